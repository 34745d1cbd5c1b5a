"""Where the recent context occurred before, and what followed. Token ids only; no request, no sharing policy.

A ring of tokens with one hash table per context length, in the manner of LZ77 match finders: `head[bucket]` is the
latest position whose last L tokens fall into the bucket, `prev[position]` the one before it. Evicted positions need no
removal: a link is followed only while positions get older, and every match is verified by comparing tokens.
Everything is allocated once, so memory is bounded whatever is appended.

    ring   .. a b c | x a b c y ..       slot of a match = that of its last token (c);
                  ^       ^              the proposal is what follows it
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verdraft.spec.draft import EMPTY, Draft, common_length

SEPARATOR = -1  # stored between sequences; equal to no token
_MASK = (1 << 64) - 1
_BASE = 0xD6E8FEB86659FD93  # any odd number: hashes are sums of token * base**i modulo 2**64
_SPREAD = 0x9E3779B97F4A7C15
_BULK = 48  # from this many tokens on, numpy beats a loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposing:
    """How matches become a draft. The estimate of a path is the product over its tokens of
    (votes for the token) / (votes for any token + doubt), where a match votes with its length so far.

    The defaults were chosen by replaying recorded chat, code, edit and agent traces; with them the estimates are
    close to the observed shares (a single match of 2, 4, 8 tokens was right about 0.5, 0.65, 0.8 of the time).
    """

    levels: tuple[int, ...] = (1, 2, 4, 8, 16)  # context lengths that have a table, ascending
    max_match: int = 64  # matches are not measured beyond this
    max_candidates: int = 8  # most recent occurrences looked at
    factor: float = 2.0  # drafts are at most factor * match_len + offset long
    offset: float = 0.0
    min_prob: float = 0.2
    doubt: float = 2.0


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier occurrence of the end of the context."""

    slot: int  # of its last token
    age: int  # tokens stored after it
    length: int  # tokens that agree


class _Level:
    """Chains of the positions whose last `length` tokens share a bucket. Links are slot + 1; 0 ends a chain."""

    def __init__(self, length: int, capacity: int) -> None:
        bits = max(4, (capacity - 1).bit_length())
        self.length = length
        self.shift = 64 - bits
        self.out_factor = pow(_BASE, length, 1 << 64)
        self.heads = np.zeros(1 << bits, np.int32)  # zero pages cost nothing until they are used
        self.links = np.zeros(capacity, np.int32)
        self.head, self.prev = self.heads.data, self.links.data
        self.hash = 0  # of the last `length` tokens of the open sequence, or of all when it is shorter

    def bucket(self, hash_value: int) -> int:
        return (hash_value * _SPREAD & _MASK) >> self.shift

    def hash_of(self, tokens: Sequence[int]) -> int:
        value = 0
        for token in tokens[-self.length :]:
            value = value * _BASE + token & _MASK
        return value

    def link(self, slot: int) -> None:
        """Make `slot` the latest of the current hash's bucket."""
        bucket = self.bucket(self.hash)
        self.prev[slot] = self.head[bucket]
        self.head[bucket] = slot + 1

    def window_hashes(self, tokens: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """hash_of every window: result[i] is that of tokens[i : i + length]."""
        count = max(0, tokens.size - self.length + 1)
        values = np.zeros(count, np.uint64)
        for i in range(self.length):
            values = values * np.uint64(_BASE) + tokens[i : i + count]
        return values

    def buckets(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        return ((hashes * np.uint64(_SPREAD)) >> np.uint64(self.shift)).astype(np.int64)

    def link_many(self, slots: NDArray[np.int64], hashes: NDArray[np.uint64]) -> None:
        """As link(slot) for one after the other; all slots differ."""
        buckets = self.buckets(hashes)
        order = np.argsort(buckets, kind="stable")
        slots, buckets = slots[order], buckets[order]
        is_first = np.r_[True, buckets[1:] != buckets[:-1]]
        before = np.r_[0, slots[:-1] + 1]
        self.links[slots] = np.where(is_first, self.heads[buckets], before)
        is_last = np.r_[is_first[1:], True]
        self.heads[buckets[is_last]] = slots[is_last] + 1


class SuffixIndex:
    """The last `max_tokens` tokens of one or more sequences, searchable by what came before them."""

    def __init__(self, max_tokens: int, how: Proposing | None = None) -> None:
        self.how = how or Proposing()
        if max_tokens <= self.how.levels[-1]:
            raise ValueError(
                f"max_tokens must be larger than the longest level, {self.how.levels[-1]}; got {max_tokens}"
            )
        self._capacity = max_tokens
        self._ring = np.zeros(2 * max_tokens, np.int32)  # written twice: every window is contiguous in one half
        self._tokens = self._ring.data
        self._levels = tuple(_Level(length, max_tokens) for length in self.how.levels)
        self._next = 0  # slot of the next token
        self._run_len = 0  # tokens of the open sequence
        self.num_tokens = 0  # stored, separators included; at most max_tokens

    def append(self, token: int, findable: bool = True) -> None:
        """One more token of the open sequence. A proposal never starts behind a token that is not findable."""
        slot, run_len, capacity, tokens = self._next, self._run_len, self._capacity, self._tokens
        tokens[slot] = tokens[slot + capacity] = token
        for level in self._levels:
            length = level.length
            gone = tokens[slot + capacity - length] if run_len >= length else 0
            level.hash = level.hash * _BASE + token - gone * level.out_factor & _MASK
            if findable and run_len + 1 >= length:
                level.link(slot)
        self._advance(1)

    def extend(self, tokens: Sequence[int]) -> None:
        """As append() for each of them."""
        if len(tokens) < _BULK:
            for token in tokens:
                self.append(token)
            return
        step = self._capacity - self.how.levels[-1]
        array = np.asarray(tokens, np.int64)
        for begin in range(0, array.size, step):
            self._append_many(array[begin : begin + step])

    def end_sequence(self) -> None:
        """Close the open sequence: no match and no proposal crosses its end."""
        slot = self._next
        self._tokens[slot] = self._tokens[slot + self._capacity] = SEPARATOR
        self._advance(1)
        self._run_len = 0
        for level in self._levels:
            level.hash = 0

    def clear(self) -> None:
        """Forget everything."""
        for level in self._levels:
            level.heads[:] = 0
            level.hash = 0
        self._next = self._run_len = self.num_tokens = 0

    def _advance(self, count: int) -> None:
        self._next = (self._next + count) % self._capacity
        self._run_len += count
        self.num_tokens = min(self.num_tokens + count, self._capacity)

    def _append_many(self, tokens: NDArray[np.int64]) -> None:
        slots = (self._next + np.arange(tokens.size)) % self._capacity
        before = np.array(self.context(self.how.levels[-1]), np.int64)
        joined = np.concatenate((before, tokens)).astype(np.uint64)
        self._ring[slots] = self._ring[slots + self._capacity] = tokens
        for level in self._levels:
            hashes = level.window_hashes(joined)[-tokens.size :]  # the windows that end in a new token
            if hashes.size:
                level.link_many(slots[-hashes.size :], hashes)
            level.hash = level.hash_of(joined[-level.length :].tolist())
        self._advance(tokens.size)

    def context(self, length: int) -> list[int]:
        """The last tokens of the open sequence, at most `length`."""
        return self._window(self._next - 1, min(length, self._run_len, self.num_tokens))

    def _window(self, slot: int, length: int) -> list[int]:
        """The `length` tokens that end at `slot`."""
        end = slot % self._capacity + self._capacity + 1
        window: list[int] = self._tokens[end - length : end].tolist()
        return window

    def newest(self, count: int) -> NDArray[np.int32]:
        """A copy of the last `count` tokens of all sequences, at most num_tokens, separators included."""
        end = self._next + self._capacity
        return self._ring[end - count : end].copy()

    def hashes(self) -> dict[int, int]:
        """Hashes of the open sequence's end by their lengths, as clue() of any index takes them."""
        return {level.length: level.hash for level in self._levels if level.length <= self._run_len}

    def clue(self, context: Sequence[int], hashes: Mapping[int, int]) -> int:
        """How much of `context`, whose ends have these hashes, occurred before: the length of a level, or 0. A look at
        the latest entry of each level, so it may miss some."""
        newest, found = (self._next - 1) % self._capacity, 0
        for level in self._levels:
            if (hash_value := hashes.get(level.length)) is None:
                continue
            slot = level.head[level.bucket(hash_value)] - 1
            if slot == newest:  # the end of the open sequence itself
                slot = level.prev[slot] - 1
            if slot < 0 or self._window(slot, level.length) != context[-level.length :]:
                break
            found = level.length
        return found

    def find(self, context: Sequence[int], hashes: Mapping[int, int] | None = None) -> list[Match]:
        """Earlier occurrences of the end of `context`, the most recent first: those that share the longest level.
        `hashes` are those of the context's end by their lengths, if known."""
        context = list(context[-self.how.max_match :])
        hashes = self._hashes(context) if hashes is None else hashes
        backwards = context[::-1]
        for level in reversed(self._levels):
            if (hash_value := hashes.get(level.length)) is not None:
                slot = level.head[level.bucket(hash_value)] - 1
                if slot >= 0 and (matches := self._follow(level, slot, backwards)):
                    return matches
        return []

    def _hashes(self, context: list[int]) -> dict[int, int]:
        return {level.length: level.hash_of(context) for level in self._levels if level.length <= len(context)}

    def _follow(self, level: _Level, slot: int, backwards: list[int]) -> list[Match]:
        """The matches in the chain from `slot` on; `backwards` is the context from its last token on."""
        matches = []
        newest, last_age = self._next - 1, 0
        for _ in range(self.how.max_candidates + 1):  # one may be the end of the open sequence, which nothing follows
            age = (newest - slot) % self._capacity
            if slot < 0 or age < last_age or age >= self.num_tokens:
                break
            if age > 0:
                length = self._agreeing(slot, age, backwards)
                if length >= level.length:
                    matches.append(Match(slot, age, length))
            slot, last_age = level.prev[slot] - 1, age + 1
        return matches[: self.how.max_candidates]

    def _agreeing(self, slot: int, age: int, backwards: list[int]) -> int:
        """How many tokens ending at `slot` equal the end of the context."""
        most = min(len(backwards), self.num_tokens - age)
        end = slot + self._capacity
        length = 0
        for stored, wanted in zip(self._tokens[end : end - most : -1], backwards, strict=False):
            if stored != wanted:
                break
            length += 1
        return length

    def propose(self, context: Sequence[int], limit: int, hashes: Mapping[int, int] | None = None) -> Draft:
        """What followed the end of `context` before, at most `limit` tokens; EMPTY when nothing is known. `hashes` as
        in find()."""
        matches = self.find(context, hashes)
        if not matches or limit <= 0:
            return EMPTY
        match_len = max(match.length for match in matches)
        limit = min(limit, int(self.how.factor * match_len + self.how.offset))
        return self._walk(matches, match_len, limit)

    def _walk(self, matches: list[Match], match_len: int, limit: int) -> Draft:
        tokens: list[int] = []
        probs: list[float] = []
        prob = 1.0
        ahead = [(match.length, self._following(match, limit)) for match in matches]
        for token, votes, all_votes in _elections(ahead, limit):
            prob *= votes / (all_votes + self.how.doubt)
            if token == SEPARATOR or prob < self.how.min_prob:
                break
            tokens.append(token)
            probs.append(prob)
        return Draft(tuple(tokens), "suffix", tuple(probs), match_len) if tokens else EMPTY

    def _following(self, match: Match, limit: int) -> list[int]:
        """What came after the match; behind the newest token the sequence goes on with itself: periods repeat."""
        count = min(limit, match.age)
        known = self._window(match.slot + count, count)
        return (known * -(-limit // count))[:limit]

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        capacity = self._capacity
        assert np.array_equal(self._ring[:capacity], self._ring[capacity:])
        assert 0 <= self._next < capacity
        assert 0 <= self.num_tokens <= capacity
        run = self.context(self.how.levels[-1])
        assert SEPARATOR not in run
        for level in self._levels:
            assert level.hash == level.hash_of(run)
            for links in (level.heads, level.links):
                assert links.min() >= 0
                assert links.max() <= capacity
            self._check_heads(level)

    def _check_heads(self, level: _Level) -> None:
        """A head points into its own bucket, unless its token was evicted and the slot used again."""
        for bucket in np.flatnonzero(level.heads).tolist():
            slot = level.head[bucket] - 1
            age = (self._next - 1 - slot) % self._capacity
            assert age < self.num_tokens
            window = self._window(slot, level.length)
            if SEPARATOR not in window and age + level.length <= self.num_tokens < self._capacity:
                assert level.bucket(level.hash_of(window)) == bucket


def _elections(ahead: list[tuple[int, list[int]]], limit: int) -> Iterator[tuple[int, int, int]]:
    """At every depth the token with the most votes (the most recent of equals), its votes, and all votes.

    `ahead` are (length of the match, what came after it). Who wanted another token does not vote any more.
    """
    depth = 0
    while depth < limit:
        lines = [line for _, line in ahead]
        agreed = common_length(min(lines), max(lines)) if len(lines) > 1 else limit
        weight, count = sum(length for length, _ in ahead), len(ahead)
        for together in range(depth, agreed):
            all_votes = weight + count * together
            yield lines[0][together], all_votes, all_votes
        if agreed == limit:
            return
        depth = agreed
        votes: dict[int, int] = {}
        for length, line in ahead:
            votes[line[depth]] = votes.get(line[depth], 0) + length + depth
        best = max(votes, key=votes.__getitem__)
        yield best, votes[best], sum(votes.values())
        ahead = [(length, line) for length, line in ahead if line[depth] == best]
        depth += 1

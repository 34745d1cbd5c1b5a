"""Filling and searching a suffix index in plain Python: what kernels/suffix.cpp does, for machines without a compiler,
and what it is compared with. Knows token ids and memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from verdraft.spec.draft import EMPTY, Draft, common_length
from verdraft.spec.suffix_memory import SEPARATOR, SuffixMemory


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier occurrence of the end of the context."""

    slot: int  # of its last token
    age: int  # tokens stored after it
    length: int  # tokens that agree


class PortableSearch:
    """See SuffixIndex for what each does."""

    def extend(self, memory: SuffixMemory, tokens: Sequence[int], findable: bool) -> None:
        fields = memory.fields
        for token in tokens:
            slot = fields.next
            for level, heads, links in zip(memory.levels, memory.heads, memory.links, strict=True):
                old = slot + fields.capacity - level.length
                level.push(token, int(memory.ring[old]) if fields.run_len >= level.length else 0)
                if findable and fields.run_len + 1 >= level.length:
                    bucket = level.bucket(level.hash)
                    links[slot], heads[bucket] = heads[bucket], slot + 1
            memory.ring[slot] = memory.ring[slot + fields.capacity] = token
            memory.advance()

    def clue(self, memory: SuffixMemory, of: SuffixMemory) -> int:
        newest, found = (memory.fields.next - 1) % memory.fields.capacity, 0
        for level, heads, links in zip(memory.levels, memory.heads, memory.links, strict=True):
            context = of.context(level.length)
            if len(context) < level.length:
                break
            slot = int(heads[level.bucket(level.hash_of(context))]) - 1
            if slot == newest:  # the end of the open sequence itself
                slot = int(links[slot]) - 1
            if slot < 0 or memory.window(slot, level.length) != context:
                break
            found = level.length
        return found

    def find(self, memory: SuffixMemory, of: SuffixMemory) -> list[Match]:
        """Earlier occurrences of the end of `of`, the most recent first: those that share the longest level."""
        context = of.context(memory.how.max_match)
        for level, heads, links in reversed(list(zip(memory.levels, memory.heads, memory.links, strict=True))):
            if len(context) >= level.length:
                slot = int(heads[level.bucket(level.hash_of(context))]) - 1
                if matches := _follow(memory, level.length, links.data, slot, context[::-1]):
                    return matches
        return []

    def propose(self, memory: SuffixMemory, of: SuffixMemory, limit: int) -> Draft:
        matches = self.find(memory, of)
        match_len = max((match.length for match in matches), default=0)
        limit = min(limit, int(memory.how.factor * match_len + memory.how.offset))
        tokens: list[int] = []
        probs: list[float] = []
        prob = 1.0
        ahead = [(match.length, _following(memory, match, limit)) for match in matches if limit > 0]
        for token, votes, all_votes in _elections(ahead, limit if ahead else 0):
            prob *= votes / (all_votes + memory.how.doubt)
            if token == SEPARATOR or prob < memory.how.min_prob:
                break
            tokens.append(token)
            probs.append(prob)
        return Draft(tuple(tokens), "suffix", tuple(probs), match_len) if tokens else EMPTY


def _follow(memory: SuffixMemory, least: int, links: memoryview, slot: int, backwards: list[int]) -> list[Match]:
    """The matches in the chain from `slot` on; `backwards` is the context from its last token on."""
    matches: list[Match] = []
    fields, most = memory.fields, memory.how.max_candidates
    newest, last_age = fields.next - 1, 0
    for _ in range(most + 1):  # one may be the end of the open sequence, which nothing follows
        age = (newest - slot) % fields.capacity
        if slot < 0 or age < last_age or age >= fields.num_tokens:
            break
        if age > 0:
            stored = memory.window(slot, min(len(backwards), fields.num_tokens - age))
            length = common_length(stored[::-1], backwards)
            if length >= least:
                matches.append(Match(slot, age, length))
        slot, last_age = links[slot] - 1, age + 1
    return matches[:most]


def _following(memory: SuffixMemory, match: Match, limit: int) -> list[int]:
    """What came after the match; behind the newest token the sequence goes on with itself: periods repeat."""
    count = min(limit, match.age)
    known = memory.window(match.slot + count, count)
    return (known * -(-limit // count))[:limit]


def _elections(ahead: list[tuple[int, list[int]]], limit: int) -> Iterator[tuple[int, int, int]]:
    """At every depth the token with the most votes (the most recent of equals), its votes, and all votes.

    `ahead` are (length of the match, what came after it). Who wanted another token does not vote any more.
    """
    for depth in range(limit):
        votes: dict[int, int] = {}
        for length, line in ahead:
            votes[line[depth]] = votes.get(line[depth], 0) + length + depth
        best = max(votes, key=votes.__getitem__)
        yield best, votes[best], sum(votes.values())
        ahead = [(length, line) for length, line in ahead if line[depth] == best]

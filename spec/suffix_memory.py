"""What a suffix index holds: a ring of tokens with a hash table per context length, as LZ77 match finders have it.

`heads[bucket]` is the latest position whose last L tokens fall into the bucket, `links[position]` the one before it.
Evicted positions need no removal: a link is followed only while positions get older, and every match is verified by
comparing tokens. Everything is allocated once, so memory is bounded whatever is appended.

    ring   .. a b c | x a b c y ..       slot of a match = that of its last token (c);
                  ^       ^              the proposal is what follows it
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SEPARATOR = -1  # stored between sequences; equal to no token
_MASK = (1 << 64) - 1
_BASE = 0xD6E8FEB86659FD93  # any odd number: hashes are sums of token * base**i modulo 2**64
_SPREAD = 0x9E3779B97F4A7C15
_MOST_LEVELS, _MOST_CANDIDATES = 8, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposing:
    """How matches become a draft. The estimate of a path is the product over its tokens of
    (votes for the token) / (votes for any token + doubt), where a match votes with its length so far.

    The defaults were chosen by replaying recorded chat, code, edit and agent traces; with them the estimates are
    close to the observed shares (a single match of 2, 4, 8 tokens was right about 0.5, 0.65, 0.8 of the time).
    """

    levels: tuple[int, ...] = (1, 2, 4, 8, 16)  # context lengths that have a table, ascending, at most 8 of them
    max_match: int = 64  # matches are not measured beyond this
    max_candidates: int = 8  # most recent occurrences looked at, at most 64
    factor: float = 2.0  # drafts are at most factor * match_len + offset long
    offset: float = 0.0
    min_prob: float = 0.2
    doubt: float = 2.0

    @property
    def longest(self) -> int:
        """Tokens of the longest draft."""
        return int(self.factor * self.max_match + self.offset)


class Level(ctypes.Structure):
    """One context length, as kernels/suffix.cpp sees it."""

    length: int
    shift: int
    out_factor: int
    hash: int  # of the last `length` tokens of the open sequence, or of all when it is shorter
    _fields_ = (
        ("length", ctypes.c_int64),
        ("shift", ctypes.c_int64),
        ("out_factor", ctypes.c_uint64),
        ("hash", ctypes.c_uint64),
        ("heads", ctypes.c_void_p),
        ("links", ctypes.c_void_p),
    )

    def bucket(self, hash_value: int) -> int:
        """Where the chain of this hash begins."""
        return (hash_value * _SPREAD & _MASK) >> self.shift

    def hash_of(self, tokens: Sequence[int]) -> int:
        """Of the last `length` tokens, or of all."""
        value = 0
        for token in tokens[-self.length :]:
            value = value * _BASE + token & _MASK
        return value

    def push(self, token: int, gone: int) -> None:
        """One more token of the open sequence; `gone` is the one that is now too old, or 0."""
        self.hash = self.hash * _BASE + token - gone * self.out_factor & _MASK


class IndexFields(ctypes.Structure):
    """A whole index, as kernels/suffix.cpp sees it."""

    capacity: int
    next: int  # slot of the next token
    run_len: int  # tokens of the open sequence
    num_tokens: int  # stored, separators included
    levels: Sequence[Level]
    _fields_ = (
        ("capacity", ctypes.c_int64),
        ("next", ctypes.c_int64),
        ("run_len", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("max_match", ctypes.c_int64),
        ("max_candidates", ctypes.c_int64),
        ("factor", ctypes.c_double),
        ("offset", ctypes.c_double),
        ("min_prob", ctypes.c_double),
        ("doubt", ctypes.c_double),
        ("ring", ctypes.c_void_p),
        ("num_levels", ctypes.c_int64),
        ("levels", Level * _MOST_LEVELS),
    )


class Found:
    """Where a search in C++ leaves a draft of at most `longest` tokens, until the next one."""

    def __init__(self, longest: int) -> None:
        self.tokens, self.probs = (ctypes.c_int32 * longest)(), (ctypes.c_double * longest)()
        self.match_len = ctypes.c_int64()
        self.addresses = [ctypes.addressof(place) for place in (self.tokens, self.probs, self.match_len)]


class SuffixMemory:
    """Allocated for `max_tokens` tokens of one or more sequences; empty."""

    def __init__(self, max_tokens: int, how: Proposing) -> None:
        if max_tokens <= how.levels[-1]:
            raise ValueError(f"max_tokens must be larger than the longest level, {how.levels[-1]}; got {max_tokens}")
        assert len(how.levels) <= _MOST_LEVELS
        assert how.max_candidates <= _MOST_CANDIDATES
        bits = max(4, (max_tokens - 1).bit_length())
        self.how = how
        self.ring = np.zeros(2 * max_tokens, np.int32)  # written twice: every window is contiguous in one half
        self.heads = [np.zeros(1 << bits, np.int32) for _ in how.levels]  # zero pages cost nothing until they are used
        self.links = [np.zeros(max_tokens, np.int32) for _ in how.levels]
        levels = (
            Level(length, 64 - bits, pow(_BASE, length, 1 << 64), 0, heads.ctypes.data, links.ctypes.data)
            for length, heads, links in zip(how.levels, self.heads, self.links, strict=True)
        )
        self.fields = IndexFields(
            max_tokens,
            *(0, 0, 0),
            *(how.max_match, how.max_candidates, how.factor, how.offset, how.min_prob, how.doubt),
            *(self.ring.ctypes.data, len(how.levels), (Level * _MOST_LEVELS)(*levels)),
        )
        self.address = ctypes.addressof(self.fields)
        self.found = Found(how.longest)
        self.levels = self.fields.levels[: len(how.levels)]

    def end_sequence(self) -> None:
        """Store a separator: no match and no proposal crosses it."""
        fields = self.fields
        self.ring[fields.next] = self.ring[fields.next + fields.capacity] = SEPARATOR
        self.advance()
        self._forget_run()

    def advance(self) -> None:
        """A slot has been filled."""
        fields = self.fields
        fields.next = (fields.next + 1) % fields.capacity
        fields.num_tokens = min(fields.num_tokens + 1, fields.capacity)
        fields.run_len += 1

    def clear(self) -> None:
        """Forget everything."""
        for heads in self.heads:
            heads[:] = 0
        self.fields.next = self.fields.num_tokens = 0
        self._forget_run()

    def _forget_run(self) -> None:
        self.fields.run_len = 0
        for level in self.levels:
            level.hash = 0

    def window(self, slot: int, length: int) -> list[int]:
        """The `length` tokens that end at `slot`."""
        end = slot % self.fields.capacity + self.fields.capacity + 1
        window: list[int] = self.ring[end - length : end].tolist()
        return window

    def context(self, length: int) -> list[int]:
        """The last tokens of the open sequence, at most `length`."""
        return self.window(self.fields.next - 1, min(length, self.fields.run_len, self.fields.num_tokens))

    def newest(self, count: int) -> NDArray[np.int32]:
        """A copy of the last `count` tokens of all sequences, at most num_tokens, separators included."""
        end = self.fields.next + self.fields.capacity
        return self.ring[end - count : end].copy()

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        capacity, fields = self.fields.capacity, self.fields
        assert np.array_equal(self.ring[:capacity], self.ring[capacity:])
        assert 0 <= fields.next < capacity
        assert 0 <= fields.num_tokens <= capacity
        run = self.context(self.how.levels[-1])
        assert SEPARATOR not in run
        for level, heads, links in zip(self.levels, self.heads, self.links, strict=True):
            assert level.hash == level.hash_of(run)
            for slots in (heads, links):
                assert slots.min() >= 0
                assert slots.max() <= capacity
            self._check_heads(level, heads)

    def _check_heads(self, level: Level, heads: NDArray[np.int32]) -> None:
        """A head points into its own bucket, unless its token was evicted and the slot used again."""
        for bucket in np.flatnonzero(heads).tolist():
            slot = int(heads[bucket]) - 1
            age = (self.fields.next - 1 - slot) % self.fields.capacity
            assert age < self.fields.num_tokens
            window = self.window(slot, level.length)
            whole = age + level.length <= self.fields.num_tokens < self.fields.capacity
            if SEPARATOR not in window and whole:
                assert level.bucket(level.hash_of(window)) == bucket

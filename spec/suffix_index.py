"""Where the recent context occurred before, and what followed. Token ids only; no request, no sharing policy."""

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from verdraft.kernels.chooser import choose_draft_calls
from verdraft.kernels.native import DraftCalls
from verdraft.spec.draft import EMPTY, Draft
from verdraft.spec.suffix_memory import Proposing, SuffixMemory
from verdraft.spec.suffix_search import PortableSearch


class Search(Protocol):
    """Fills and searches an index's memory; all implementations do the same."""

    def extend(self, memory: SuffixMemory, tokens: Sequence[int], findable: bool) -> None: ...

    def clue(self, memory: SuffixMemory, of: SuffixMemory) -> int: ...

    def propose(self, memory: SuffixMemory, of: SuffixMemory, limit: int) -> Draft: ...


class NativeSearch:
    """In C++: some tenths of a microsecond a token and about two a draft."""

    def __init__(self, calls: DraftCalls) -> None:
        self._calls = calls

    def extend(self, memory: SuffixMemory, tokens: Sequence[int], findable: bool) -> None:
        ids = array("i", tokens)
        self._calls.extend(memory.address, ids.buffer_info()[0], len(ids), findable)

    def clue(self, memory: SuffixMemory, of: SuffixMemory) -> int:
        found: int = self._calls.clue(memory.address, of.address)
        return found

    def propose(self, memory: SuffixMemory, of: SuffixMemory, limit: int) -> Draft:
        found = memory.found
        count = self._calls.propose(memory.address, of.address, min(limit, len(found.tokens)), *found.addresses)
        if count <= 0:
            return EMPTY
        return Draft(tuple(found.tokens[:count]), "suffix", tuple(found.probs[:count]), found.match_len.value)


@cache
def best_search() -> Search:
    """The quickest that this machine has."""
    calls = choose_draft_calls()
    return NativeSearch(calls) if calls else PortableSearch()


class SuffixIndex:
    """The last `max_tokens` tokens of one or more sequences, searchable by what came before them."""

    def __init__(self, max_tokens: int, how: Proposing | None = None, search: Search | None = None) -> None:
        """Raises ValueError where `max_tokens` is not more than the longest level."""
        self.memory = SuffixMemory(max_tokens, how or Proposing())
        self._search = search or best_search()

    def extend(self, tokens: Sequence[int], findable: bool = True) -> None:
        """More tokens of the open sequence. A proposal never starts behind a token that is not findable."""
        self._search.extend(self.memory, tokens, findable)

    def end_sequence(self) -> None:
        """Close the open sequence: no match and no proposal crosses its end."""
        self.memory.end_sequence()

    def clear(self) -> None:
        """Forget everything."""
        self.memory.clear()

    def clue(self, of: "SuffixIndex") -> int:
        """How much of the end of `of` (which may be this one) occurred here before: the length of a level, or 0. A look
        at the latest entry of each level, so it may miss some."""
        return self._search.clue(self.memory, of.memory)

    def propose(self, of: "SuffixIndex", limit: int) -> Draft:
        """What followed the end of `of` (which may be this one) here before, at most `limit` tokens; EMPTY when nothing
        is known."""
        return self._search.propose(self.memory, of.memory, limit)

    @property
    def num_tokens(self) -> int:
        """Tokens stored, separators included; at most max_tokens."""
        return self.memory.fields.num_tokens

    def newest(self, count: int) -> NDArray[np.int32]:
        """A copy of the last `count` tokens of all sequences, at most num_tokens, separators included."""
        return self.memory.newest(count)

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        self.memory.check_integrity()


def ending(tokens: Sequence[int]) -> SuffixIndex:
    """A small index that ends like this, to search another one with."""
    index = SuffixIndex(max(32, len(tokens)))
    index.extend(tokens)
    return index

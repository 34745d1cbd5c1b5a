"""How many drafted tokens a step should verify: as long as they bring more tokens a second than the step yields anyway.

Knows probabilities and seconds. Under load a pass is no longer nearly free per row, so drafts shrink by themselves
(DESIGN section 6).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


class Costs(Protocol):
    """Seconds of a full-depth pass by its number of tokens."""

    def of(self, tokens: float) -> float:
        """Of a pass over `tokens` tokens, a number that may be expected rather than counted."""
        ...

    def least_more(self, tokens: int) -> float:
        """Of one more token in a pass over `tokens` or more, where it costs least."""
        ...


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of a full-depth pass by its number of tokens: measured points, straight lines between them."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    _every: tuple[float, ...] = field(init=False, repr=False, compare=False)  # of 0, 1, 2, .. tokens
    _least: tuple[float, ...] = field(init=False, repr=False, compare=False)  # for one more, from there on at the least

    def __post_init__(self) -> None:
        every = np.interp(range(self.tokens[-1] + 1), self.tokens, self.seconds)
        steps = np.r_[np.diff(every), self.seconds[-1] / self.tokens[-1]]
        object.__setattr__(self, "_every", tuple(every.tolist()))
        object.__setattr__(self, "_least", tuple(np.minimum.accumulate(steps[::-1])[::-1].tolist()))

    def of(self, tokens: float) -> float:
        """Seconds of a pass over `tokens` tokens, a number that may be expected rather than counted; beyond the last
        point in proportion to it."""
        if tokens >= self.tokens[-1]:
            return self.seconds[-1] * tokens / self.tokens[-1]
        whole = int(tokens)
        below = self._every[whole]
        return below if whole == tokens else below + (tokens - whole) * (self._every[whole + 1] - below)

    def least_more(self, tokens: int) -> float:
        """Seconds of one more token in a pass over `tokens` or more, where it costs least."""
        return self._least[min(tokens, self.tokens[-1])]

    def points(self) -> list[tuple[int, float]]:
        """What was measured: (tokens, seconds)."""
        return list(zip(self.tokens, self.seconds, strict=True))


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds that attention takes for each token of context beyond those of the pass that a table tells of: once for
    every sequence, whose rows share what is read, and once for every row."""

    sequence: float = 0.0
    row: float = 0.0
    context: int = 0  # tokens, of the one sequence of that pass

    def costs(self, table: CostTable, contexts: Sequence[int], more: float = 0.0) -> Costs:
        """The table for a pass whose sequences have contexts of so many tokens, in a step that takes `more` seconds."""
        if not contexts or self.sequence == self.row == more == 0.0:
            return table
        tokens = sum(contexts)
        beyond = tokens / len(contexts) - self.context
        return _WithContexts(table, self.sequence * (tokens - self.context) + more, self.row * beyond)


@dataclass(frozen=True, slots=True)
class _WithContexts:
    """A table, and seconds beside it: of the pass, and of each of its tokens."""

    table: CostTable
    whole: float
    each: float

    def of(self, tokens: float) -> float:
        return self.table.of(tokens) + self.whole + self.each * tokens

    def least_more(self, tokens: int) -> float:
        return self.table.least_more(tokens) + self.each


FREE = CostTable((1,), (0.0,))  # a further row costs nothing: every draft is verified whole


def spend(probs: Sequence[Sequence[float]], num_decoding: int, costs: Costs) -> list[int]:
    """How many tokens of each draft to verify. probs[i][j] is the probability that draft i is accepted beyond token j.

    Every one of `num_decoding` sequences has one row and yields one token anyway. The likeliest drafted token of all
    comes next, and as many are taken as bring the most expected tokens a second. (Path probabilities fall along a
    draft, so its tokens come in order. A pass may get much dearer with one row and hardly with the next ones, so the
    first token that does not pay is not the end; that is where no later one can.)
    """
    taken: list[int] = []  # of every token its draft, in the order in which they come
    best, best_rate = 0, 0.0
    lengths, expected, rows = [0] * len(probs), float(num_decoding), num_decoding
    heap = [(-draft[0], i) for i, draft in enumerate(probs) if draft]
    heapq.heapify(heap)
    while True:
        rate = expected / max(costs.of(rows), 1e-9)
        if rate >= best_rate:
            best, best_rate = len(taken), rate
        if not heap or -heap[0][0] < best_rate * costs.least_more(rows):
            for i in taken[best:]:
                lengths[i] -= 1
            return lengths
        prob, i = -heap[0][0], heap[0][1]
        expected, rows = expected + prob, rows + 1
        taken.append(i)
        lengths[i] += 1
        if lengths[i] < len(probs[i]):
            heapq.heapreplace(heap, (-probs[i][lengths[i]], i))
        else:
            heapq.heappop(heap)

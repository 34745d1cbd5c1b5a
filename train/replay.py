"""What exits would have brought on recorded continuations: agreement, accepted lengths, passes. No model runs.

Exact as far as drafts are right: until then the recorded text is the drafted one. Behind the first wrong token of a
window nothing will be kept, so only the cost of what is still drafted there is estimated.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from verdraft.model.exit_head import TokenIds

Flags = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trace:
    """The model's own greedy tokens, one after the other; `run[i]` rows follow row i in its
    sequence, itself included."""

    run: Ints
    draft_right: Flags  # the draft head's first choice is the token
    check_right: Flags
    agree: Flags  # both heads choose the same


@dataclass(frozen=True, slots=True)
class Cycles:
    """Sums over all cycles of a replay; a cycle is one pass over the last segment."""

    num: int
    tokens: int  # committed: accepted and recovered or bonus
    verified: int  # window tokens that the last segment saw
    accepted: int
    drafts: int  # draft passes over the first segment
    checks: int  # passes over the middle segment

    @property
    def tokens_per_cycle(self) -> float:
        return self.tokens / max(1, self.num)

    @property
    def acceptance(self) -> float:
        return self.accepted / max(1, self.verified)


def greedy_trace(rows: Mapping[str, Tensor], draft: TokenIds, check: TokenIds) -> Trace:
    """From the heads' choices at every row; only rows where the model wrote the next token at temperature 0 count."""
    kept = (rows["own"] & rows["greedy"]).numpy()
    tokens, sequence = rows["next"].numpy()[kept], rows["sequence"].numpy()[kept]
    ends = np.flatnonzero(np.diff(sequence, append=-1) != 0)
    run = ends[np.searchsorted(ends, np.arange(len(tokens)))] - np.arange(len(tokens)) + 1
    return Trace(run, draft[kept] == tokens, check[kept] == tokens, draft[kept] == check[kept])


def early_exit_cycles(trace: Trace, length: int) -> Cycles:
    """The draft head proposes `length` tokens, the full model verifies them."""
    num = tokens = accepted = i = 0
    while i < len(trace.run):
        room = int(trace.run[i])
        right = trace.draft_right[i : i + min(length, room)]
        kept = int(np.argmin(right)) if not right.all() else len(right)
        step = min(kept + 1, room)
        num, tokens, accepted, i = num + 1, tokens + step, accepted + kept, i + step
    return Cycles(num, tokens, num * length, accepted, num * length, 0)


def hierarchical_cycles(trace: Trace, inner: int, window: int) -> Cycles:
    """Rounds of `inner` tokens, drafted but for the last, checked and mended by the middle head, until the window holds
    `window` tokens."""
    mean = _mean_round(trace, inner)
    num = tokens = verified = accepted = rounds = i = 0
    while i < len(trace.run):
        room = int(trace.run[i])
        size = kept = turns = 0
        wrong = False
        while size < window and not wrong and kept < room:
            added, right = _round(trace, i + kept, min(inner, room - kept))
            size, kept, turns, wrong = size + added, kept + right, turns + 1, right < added
        if wrong and size < window:  # the rest of the window is drafted in vain
            more = int(np.ceil((window - size) / mean))
            size, turns = size + round(more * mean), turns + more
        step = min(kept + 1, room)
        num, tokens, verified, accepted = num + 1, tokens + step, verified + size, accepted + min(kept, room)
        rounds, i = rounds + turns, i + step
    return Cycles(num, tokens, verified, accepted, rounds * (inner - 1), rounds)


def _round(trace: Trace, i: int, inner: int) -> tuple[int, int]:
    """Tokens that a round from row i on adds to the window, and how many of them come before the first wrong one."""
    agree = trace.agree[i : i + inner - 1]
    added = inner if agree.all() else int(np.argmin(agree)) + 1  # the last is the middle head's own in any case
    right = trace.check_right[i : i + added]
    return added, added if right.all() else int(np.argmin(right))


def _mean_round(trace: Trace, inner: int) -> float:
    """Tokens that a round adds on average, from the rate at which the heads agree."""
    rate = float(trace.agree.mean()) if len(trace.agree) else 0.0
    return sum(rate**j for j in range(inner))

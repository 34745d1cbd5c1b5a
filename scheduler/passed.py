"""What a pass is asked for and what it answers: rows of logits, or tokens where the device can tell them by itself."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from verdraft.scheduler.plan import Work
from verdraft.scheduler.sequence import Sequence
from verdraft.spec.constraint import UNCONSTRAINED

_SCORED, _DRAWN, _ASKED = range(3)  # kinds of rows, in their order

Rows = NDArray[np.float32]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Span(NamedTuple):
    """Where a work's answers are: among the tokens if they were drawn, else among the logits."""

    drawn: bool
    rows: slice


@dataclass(frozen=True, slots=True)
class Passed:
    """What came out of a pass; a span for every work of the plan, and for each rows_wanted(work) answers."""

    tokens: Ints  # [D]: the law's, where no grammar counts; or draws.BAD, draws.UNSURE
    margins: Floats  # [D]: theirs, in rounding steps (outputs.Margins); [0] where kernels are exact
    scores: (
        Floats  # [S, 1 + 2n]: log-probabilities (torch_logprobs.py) of the first of them, which somebody wants to see
    )
    logits: Rows  # [R, V]
    taps: Tensor | None  # [T, taps * hidden]: work.num_tokens rows per work, in order; None without taps
    spans: Seq[Span]
    row: Callable[[int, int], Rows]  # logits [V] of token first + i, where a grammar counts; waits for the device


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which of a pass's rows are wanted: those that are drawn and scored, those only drawn, then the others."""

    rows: Ints  # [D + R] indices into the pass
    spans: Seq[Span]
    drawn: Seq[Work]  # in the order of their rows


def rows_wanted(work: Work) -> int:
    """How many of the pass's last tokens need logits: all with prompt logprobs, else those that decide tokens."""
    if work.seq.request.params.prompt_logprobs is not None and work.start < work.seq.num_prompt:
        return work.num_tokens
    return len(work.draft.tokens) + 1 if work.yields and generates(work.seq) else 0


def generates(seq: Sequence) -> bool:
    """Whether tokens are wanted at all."""
    return seq.request.params.max_tokens != 0


def is_raw(seq: Sequence) -> bool:
    """Whether logits as they are say which tokens come, with temperature, filters and noise."""
    params = seq.request.params
    changed = params.uses_history or params.logit_bias or params.min_tokens
    return not changed and seq.request.constraint is UNCONSTRAINED


def can_be_drawn(seq: Sequence) -> bool:
    """Whether the device finds this request's tokens, whatever is drafted: where nobody wants to see the prompt's
    log-probabilities."""
    return seq.request.params.prompt_logprobs is None


def banned(seq: Sequence, ahead: int, eos: Iterable[int]) -> list[int] | None:
    """What min_tokens forbids `ahead` tokens behind the committed ones, where `eos` end a text."""
    params = seq.request.params
    return sorted({*eos, *params.stop_token_ids}) if seq.num_output + ahead < params.min_tokens else None


def order_rows(plan: Seq[Work], draws: bool) -> Wanted:
    """What the pass over this plan has to answer; `draws`: the device finds tokens where it can."""
    kinds = [_kind(work.seq) if draws else _ASKED for work in plan]
    ends = list(accumulate(work.num_tokens for work in plan))
    order = sorted(range(len(plan)), key=kinds.__getitem__)
    found: list[int] = []
    shown: list[int] = []
    spans: dict[int, Span] = {}
    for i in order:
        rows = shown if kinds[i] == _ASKED else found
        begin = len(rows)
        rows += range(ends[i] - rows_wanted(plan[i]), ends[i])
        spans[i] = Span(kinds[i] != _ASKED, slice(begin, len(rows)))
    drawn = [plan[i] for i in order if spans[i].drawn]
    return Wanted(np.array(found + shown, np.int64), [spans[i] for i in range(len(plan))], drawn)


def _kind(seq: Sequence) -> int:
    if not can_be_drawn(seq):
        return _ASKED
    return _DRAWN if seq.request.params.logprobs is None else _SCORED

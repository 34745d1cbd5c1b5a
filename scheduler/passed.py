"""What a pass is asked for and what it answers: rows of logits, or tokens where the device can tell them by itself."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from verdraft.scheduler.plan import Work
from verdraft.scheduler.sequence import Sequence
from verdraft.spec.constraint import UNCONSTRAINED

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

    tokens: Ints  # [D]: the law's, or draws.BAD
    margins: Floats  # [D]: theirs, in rounding steps (outputs.Margins); [0] where kernels are exact
    logits: Rows  # [R, V]
    taps: Tensor | None  # [T, taps * hidden]: work.num_tokens rows per work, in order; None without taps
    spans: Seq[Span]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which of a pass's rows are wanted: all that are drawn, then the others."""

    rows: Ints  # [D + R] indices into the pass
    spans: Seq[Span]


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
    """Whether the device finds this request's tokens, whatever is drafted: where no grammar counts, and nobody wants to
    see the logits."""
    params = seq.request.params
    return seq.request.constraint is UNCONSTRAINED and params.logprobs is params.prompt_logprobs is None


def banned(seq: Sequence, ahead: int, eos: Iterable[int]) -> list[int] | None:
    """What min_tokens forbids `ahead` tokens behind the committed ones, where `eos` end a text."""
    params = seq.request.params
    return sorted({*eos, *params.stop_token_ids}) if seq.num_output + ahead < params.min_tokens else None


def order_rows(plan: Seq[Work], draws: bool) -> Wanted:
    """What the pass over this plan has to answer; `draws`: the device finds tokens where it can."""
    found: list[int] = []
    shown: list[int] = []
    spans, end = [], 0
    for work in plan:
        end += work.num_tokens
        drawn = draws and can_be_drawn(work.seq)
        rows = found if drawn else shown
        begin = len(rows)
        rows += range(end - rows_wanted(work), end)
        spans.append(Span(drawn, slice(begin, len(rows))))
    return Wanted(np.array(found + shown, np.int64), spans)

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

Rows = NDArray[np.float32]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Span(NamedTuple):
    """Where a work's answers are."""

    rows: slice  # among the tokens if the device finds them, else among the logits
    told: slice  # among the prompt's scores


@dataclass(frozen=True, slots=True)
class Passed:
    """What came out of a pass, with a span for every work of the plan: tokens if `drawn`, else logits."""

    drawn: bool
    tokens: Ints  # [D]: the law's, where no grammar counts; or draws.BAD, draws.UNSURE
    margins: Floats  # [D]: theirs, in rounding steps (outputs.Margins); [0] where kernels are exact
    scores: Floats  # [S, 1 + 2n]: log-probabilities (torch_logprobs.py) of the first of them, if somebody wants some
    prompt_scores: Floats  # [P, 1 + 2n]: those of prompts
    logits: Rows  # [R, V]
    taps: Tensor | None  # [T, taps * hidden]: work.num_tokens rows per work, in order; None without taps
    spans: Seq[Span]
    row: Callable[[int, int], Rows]  # logits [V] of token first + i, where a grammar counts; waits for the device


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which of a pass's rows are wanted. Where tokens are drawn: those that decide one, the scored ones first, then
    those that score a prompt token."""

    rows: Ints  # [D + P], or [R] where the host decides: indices into the pass
    spans: Seq[Span]
    order: Seq[Work]  # that of the rows
    targets: Ints  # [P]: the prompt tokens that are scored
    top: int  # of the likeliest tokens beside these


def rows_wanted(work: Work) -> int:
    """How many of the pass's last tokens need logits: all with prompt logprobs, else those that decide tokens."""
    return work.num_tokens if scores_prompt(work) else rows_deciding(work)


def rows_deciding(work: Work) -> int:
    """How many of the pass's last tokens decide tokens."""
    return len(work.draft.tokens) + 1 if work.yields and generates(work.seq) else 0


def scores_prompt(work: Work) -> bool:
    """Whether somebody wants to see log-probabilities of prompt tokens that this pass takes."""
    return work.seq.request.params.prompt_logprobs is not None and work.start < work.seq.num_prompt


def generates(seq: Sequence) -> bool:
    """Whether tokens are wanted at all."""
    return seq.request.params.max_tokens != 0


def is_raw(seq: Sequence) -> bool:
    """Whether logits as they are say which tokens come, with temperature, filters and noise."""
    params = seq.request.params
    changed = params.uses_history or params.logit_bias or params.min_tokens
    return not changed and seq.request.constraint is UNCONSTRAINED


def banned(seq: Sequence, ahead: int, eos: Iterable[int]) -> list[int] | None:
    """What min_tokens forbids `ahead` tokens behind the committed ones, where `eos` end a text."""
    params = seq.request.params
    return sorted({*eos, *params.stop_token_ids}) if seq.num_output + ahead < params.min_tokens else None


def order_rows(plan: Seq[Work], draws: bool) -> Wanted:
    """What the pass over this plan has to answer; `draws`: the device finds tokens."""
    ends = list(accumulate(work.num_tokens for work in plan))
    order = sorted(range(len(plan)), key=lambda i: draws and plan[i].seq.request.params.logprobs is None)
    rows: list[int] = []
    told: list[int] = []
    targets: list[int] = []
    spans: dict[int, Span] = {}
    for i in order:
        work, first_row, first_told = plan[i], len(rows), len(told)
        deciding = ends[i] - rows_deciding(work)
        if scores_prompt(work):
            scoring = range(ends[i] - work.num_tokens, deciding)
            (told if draws else rows).extend(scoring)
            targets += _followers(work)[: len(scoring)] if draws else ()
        rows += range(deciding, ends[i])
        spans[i] = Span(slice(first_row, len(rows)), slice(first_told, len(told)))
    tops = [work.seq.request.params.prompt_logprobs or 0 for work in plan] if told else []
    return Wanted(
        np.array(rows + told, np.int64),
        [spans[i] for i in range(len(plan))],
        [plan[i] for i in order],
        np.array(targets, np.int64),
        max(tops, default=0),
    )


def _followers(work: Work) -> list[int]:
    """The known token behind each one of the work; any where there is none yet."""
    return [*work.seq.tokens[work.start + 1 : work.end + 1], 0]

"""What the device is told of the rows whose tokens it finds: a table of columns per row, and what changes the logits.

Arrays on the host, for one copy; nothing that a pass does not need is among them.
"""

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from verdraft.kernels.draws import Draws, Edits, Penalties
from verdraft.scheduler.batches import Arrays
from verdraft.scheduler.passed import banned, rows_deciding
from verdraft.scheduler.plan import Work
from verdraft.scheduler.sequence import Sequence
from verdraft.spec.constraint import UNCONSTRAINED
from verdraft.spec.draft import Draft

Places = Seq[tuple[Sequence, int]]  # behind the committed tokens and so many drafted ones


@dataclass(frozen=True, slots=True)
class HostDraws:
    """Draws, and what changes their logits, whose tensors are arrays still; empty: there is none."""

    columns: Arrays  # of draws.Draws, limits only where a row has some
    most: int = 0
    penalties: Arrays = field(default_factory=list)
    edits: Arrays = field(default_factory=list)
    history: int = 0  # tokens, of all penalised rows together
    scored: int = 0  # the first of the rows, whose log-probabilities somebody wants to see
    top: int = 0  # of the likeliest tokens with theirs
    held: bool = False  # whether the host may ask for a row

    @property
    def num(self) -> int:
        """Rows."""
        return len(self.columns[0])

    @property
    def arrays(self) -> Arrays:
        """What has to be where the logits are."""
        return [*self.columns, *self.penalties, *self.edits]

    def placed(self, tensors: Seq[Tensor]) -> "PlacedDraws":
        """With these arrays' tensors, which come in the same order."""
        rest, parts = iter(tensors), (self.columns, self.penalties, self.edits)
        columns, penalties, edits = ([next(rest) for _ in part] for part in parts)
        temperatures, seeds, choices, positions, *limits = columns
        return PlacedDraws(
            Draws(temperatures, seeds, choices, positions, limits[0] if limits else None, self.most),
            [
                *([Penalties(self.history, *penalties).of] if penalties else ()),
                *([Edits(*edits).of] if edits else ()),
            ],
        )


@dataclass(frozen=True, slots=True)
class PlacedDraws:
    """The same, where the logits are."""

    draws: Draws
    changes: Seq[Callable[[Tensor], Tensor]]  # of all logits, one after the other

    def changed(self, logits: Tensor) -> Tensor:  # [R, V]
        """What tokens are found in."""
        for change in self.changes:
            logits = change(logits)
        return logits


def draws_of(places: Places) -> HostDraws:
    """For the token at each place, of logits as they are (draws.Draws)."""
    columns: Arrays = [
        np.array([seq.request.params.temperature for seq, _ in places], np.float64),
        np.array([seq.seed for seq, _ in places], np.int64),
        np.array([seq.request.choice for seq, _ in places], np.int64),
        np.array([seq.num_output + ahead for seq, ahead in places], np.int64),
    ]
    shaped = {seq for seq, _ in places if not seq.is_plain}
    filtered = [seq.request.params for seq in shaped if seq.request.params.is_filtered]
    if filtered:
        columns.append(np.array([_limits(seq) for seq, _ in places], np.float64))
    return HostDraws(columns, max((params.top_k for params in filtered if params.top_p < 1.0), default=0))


def _limits(seq: Sequence) -> tuple[float, float, float, float]:
    params = seq.request.params
    if not params.is_filtered:
        return 0.0, 1.0, -math.inf, 0.0
    least = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    return params.top_k, params.top_p, least, seq.request.constraint is not UNCONSTRAINED


def draws_of_plan(drawn: Seq[Work], eos: Iterable[int]) -> HostDraws:
    """For every row of these works, in order; `eos` are the model's end tokens."""
    works = [work for work in drawn if rows_deciding(work)]
    depths = [(0, *work.draft.depths) if work.draft.tokens else (0,) for work in works]
    draws = _repeated(draws_of([(work.seq, 0) for work in works]), depths)
    if all(work.seq.is_plain for work in works):
        return draws
    places = [(work.seq, ahead) for work, own in zip(works, depths, strict=True) for ahead in own]
    penalties, history = _penalties_of(works)
    tops = [top for seq, _ in places if (top := seq.request.params.logprobs) is not None]
    return replace(
        draws,
        penalties=penalties,
        edits=_edits_of(places, eos),
        history=history,
        scored=len(tops),
        top=max(tops, default=0),
        held=any(work.seq.request.constraint is not UNCONSTRAINED for work in works),
    )


def _repeated(draws: HostDraws, depths: Seq[Seq[int]]) -> HostDraws:
    """From one row for each work to one for each of its depths."""
    sizes = [len(own) for own in depths]
    temperatures, seeds, choices, positions, *limits = (np.repeat(column, sizes, 0) for column in draws.columns)
    ahead = np.fromiter(chain.from_iterable(depths), np.int64)
    return replace(draws, columns=[temperatures, seeds, choices, np.add(positions, ahead), *limits])


def _edits_of(places: Places, eos: Iterable[int]) -> Arrays:
    """Bias and forbidden tokens: rows, tokens and what is added (draws.Edits)."""
    found: dict[tuple[int, int], float] = {}
    for row, (seq, ahead) in enumerate(places):
        params = seq.request.params
        if not params.logit_bias and not params.min_tokens:
            continue
        found |= {(row, token): value for token, value in params.logit_bias.items()}
        found |= {(row, token): -np.inf for token in banned(seq, ahead, eos) or ()}
    if not found:
        return []
    at = np.array([*found], np.int64)
    return [at[:, 0], at[:, 1], np.array([*found.values()], np.float64)]


def _penalties_of(works: Seq[Work]) -> tuple[Arrays, int]:
    """See draws.Penalties, and its size. What the rows of a work have in common is sent once."""
    rows: list[tuple[int, int, int]] = []
    factors: list[tuple[float, float, float]] = []
    drafted: list[tuple[int, int, int]] = []
    known: list[NDArray[np.int64]] = []
    first = begin = 0
    for work in works:
        params, history = work.seq.request.params, work.seq.history
        if params.uses_history:
            for row, path in enumerate(_paths(work.draft), first):
                drafted += [(len(rows), token, history.count(token) + path.count(token)) for token in set(path)]
                rows.append((row, begin, history.ids.size))
                factors.append((params.repetition_penalty, params.presence_penalty, params.frequency_penalty))
            known.append(np.stack((history.ids, history.counts)))
            begin += history.ids.size
        first += len(work.draft.tokens) + 1
    if not rows:
        return [], 0
    arrays = [
        np.array(rows).T,
        np.array(factors, np.float64).T,
        np.concatenate(known, 1),
        np.array(drafted, np.int64).reshape(-1, 3).T,
    ]
    return arrays, sum(size for _, _, size in rows)


def _paths(draft: Draft) -> list[list[int]]:
    """The drafted tokens before each row of a work: before the draft, none."""
    found: list[list[int]] = [[]]
    for token, parent in zip(draft.tokens, draft.parents or range(-1, len(draft.tokens) - 1), strict=True):
        found.append([*found[parent + 1], token])
    return found

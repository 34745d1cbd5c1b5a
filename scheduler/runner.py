"""Runs one plan through the model: stages what the pass needs, walks the segments, gives what was asked for.

Knows tensors and positions; decides nothing.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verdraft.kernels.base import Batch, LayerKV
from verdraft.kernels.draws import Draws, Sampler
from verdraft.kernels.torch_logprobs import logprobs
from verdraft.model.transformer import Transformer
from verdraft.scheduler.batches import Arrays, place, plan_batch
from verdraft.scheduler.device import Computed, Device, Found, HostDevice
from verdraft.scheduler.drawing import HostDraws, PlacedDraws, draws_of_plan
from verdraft.scheduler.passed import Ints, Passed, Rows, Span, order_rows, rows_wanted
from verdraft.scheduler.plan import UNKNOWN, Work
from verdraft.scheduler.sequence import Sequence
from verdraft.scheduler.verifier import Verified

HOST = HostDevice()
NO_TOKENS = torch.empty(0, dtype=torch.int64)
NO_MARGINS = NO_SCORES = torch.empty(0, dtype=torch.float64)
TOLD_AT_ONCE = 128  # prompt tokens: half a gigabyte while they are scored among 128 thousand others
WORTH_LEAVING_OUT = 8  # rows at the last layer: for fewer, calls of its own cost more than they save


@dataclass(frozen=True, slots=True)
class Staged:
    """A pass as the device sees it. Nothing of it changes with the sequences, so it may be computed later."""

    tokens: Tensor  # [T] int64: what the first segment takes
    segments: list["Segment"]
    taps: tuple[int, ...]
    rest: list[Tensor]  # what else the pass needs
    taken: "Taken | None" = None  # None: all tokens are known
    top: "Top | None" = None  # None: the last layer takes all rows of the last segment


@dataclass(frozen=True, slots=True)
class Taken:
    """What a pass takes of the one behind which it comes."""

    begun: "Begun"
    rows: Tensor  # [T] int64: which of its tokens each is; UNKNOWN: none

    def among(self, tokens: Tensor) -> Tensor:  # [T] -> [T]
        """With what that pass has found in its place. Of BAD nothing will count, but it has to be some token."""
        assert self.begun.tokens is not None, "passes are computed in their order"
        found = self.begun.tokens.clamp(min=0)
        return torch.where(self.rows == UNKNOWN, tokens, found[self.rows.clamp(min=0)]) if len(found) else tokens


@dataclass(slots=True)
class Begun:
    """A pass that the device was told of; `tokens` [D] are those that it finds, from when it has come to it."""

    plan: Seq[Work]
    spans: Seq[Span]
    tokens: Tensor | None = None

    @property
    def rows(self) -> dict[Sequence, int]:
        """Where among the tokens of the pass those of each sequence begin."""
        return {work.seq: span.rows.start for work, span in zip(self.plan, self.spans, strict=True)}


@dataclass(frozen=True, slots=True)
class Top:
    """What the last layer takes where only `rows` [N] of the pass are wanted behind it; of the others, it keeps KV."""

    batch: Batch
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """What the layers [first, last) take: counts[i] rows of each work, the first of them those that `waiting` for it.
    Segments that take the same rows are one here."""

    batch: Batch
    counts: list[int]
    waiting: list[list[Tensor]]  # of every work; empty: nobody's
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Runner:
    """`bounds` are the layer indices between segments: (0, L) without exits, (0, L_d, L_i, L) with two.

    `taps` are the layers, ascending, before which the residual stream is kept for an EAGLE head, L for what leaves the
    last. What was kept goes beside the stream from segment to segment: [T, hidden * (1 + layers tapped so far)].
    """

    model: Transformer
    pool: Seq[LayerKV]
    block_size: int
    bounds: tuple[int, ...]
    taps: tuple[int, ...] = ()
    device: Device = HOST
    eos: tuple[int, ...] = ()  # the model's end tokens, ascending

    @property
    def num_segments(self) -> int:
        return len(self.bounds) - 1

    def start(self, plan: list[Work], behind: Begun | None = None) -> tuple[Begun, Callable[[], Passed]]:
        """Let the device begin one full-depth pass over the plan's tokens, or do so when the one `behind` which it
        comes has ended, and take that one's tokens where the plan has UNKNOWN ones. The second of what this returns
        waits for its end."""
        wanted = order_rows(plan, self.device.sampler is not None)
        draws = draws_of_plan(wanted.order, self.eos) if self.device.sampler else None
        rest = [wanted.rows, wanted.targets, *(draws.arrays if draws else ())]
        staged = self._stage(plan, self.num_segments, rest, self._leaves_out(plan, len(wanted.rows)), behind)
        begun = Begun(plan, wanted.spans)
        read = self.device.start(partial(self._compute, staged, draws, wanted.top, begun))

        def passed() -> Passed:
            found = read()
            self.model.check()
            return Passed(
                draws is not None,
                found.tokens,
                found.margins,
                found.scores[len(wanted.targets) :],
                found.scores[: len(wanted.targets)],
                found.logits,
                found.taps,
                wanted.spans,
                partial(self._row, found),
            )

        return begun, passed

    @torch.inference_mode()
    def _compute(self, staged: Staged, draws: HostDraws | None, top: int, begun: Begun) -> Computed:
        computed = self._computed(staged, draws, top)
        begun.tokens = computed.tokens
        return computed

    def _computed(self, staged: Staged, draws: HostDraws | None, top: int) -> Computed:
        """`top`: so many of the likeliest tokens are told beside each prompt token."""
        rows, (wanted, targets, *columns) = self._walk(staged), staged.rest
        hidden = self.stream(rows)
        if staged.top:
            hidden, wanted = self._last_layer(hidden, staged.segments[-1].batch, staged.top, wanted)
        taps = rows[:, hidden.shape[1] :] if staged.taps else None
        if not self.device.sampler or not draws:
            return Computed(NO_TOKENS, NO_MARGINS, NO_SCORES, self._logits(hidden, wanted), taps)
        top = max(top, draws.top)
        scores = self._told(hidden, wanted[draws.num :], targets, top)
        logits = self._logits(hidden, wanted[: draws.num])
        tokens, margins = self._draw(self.device.sampler, logits, draws.placed(columns))
        if draws.scored:
            scores.append(logprobs(logits[: draws.scored], tokens[: draws.scored], top))
        held = logits if draws.held else None
        return Computed(tokens, margins, torch.cat(scores) if scores else NO_SCORES, logits[:0], taps, held)

    def _told(self, hidden: Tensor, rows: Tensor, targets: Tensor, top: int) -> list[Tensor]:  # [N, hidden], [P], [P]
        """Log-probabilities (torch_logprobs.py) of these tokens behind these rows. Logits of a whole prompt can be more
        than there is room for."""
        pieces = [slice(first, first + TOLD_AT_ONCE) for first in range(0, len(rows), TOLD_AT_ONCE)]
        return [logprobs(self._logits(hidden, rows[piece]), targets[piece], top) for piece in pieces]

    def _row(self, found: Found, first: int, i: int) -> Rows:
        assert found.held is not None
        (row,) = self.device.fetch([found.held[first + i]])
        return row

    def _draw(self, sampler: Sampler, logits: Tensor, placed: PlacedDraws) -> tuple[Tensor, Tensor]:
        """Tokens, and their margins (outputs.Margins) if the kernels are not exact."""
        changed = placed.changed(logits)
        if self.model.kernels.exact:
            return sampler(changed, placed.draws), NO_MARGINS
        margins = torch.empty_like(placed.draws.temperatures)
        tokens = sampler(changed, placed.draws, margins=margins)
        return tokens, margins / (logits.amax(1).abs() * torch.finfo(self.model.dtype).eps)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Find tokens of every kind once: kernels are compiled when they are first called, which takes seconds."""
        if not self.device.sampler:
            return
        limits = np.array([[1.0, 0.5, -np.inf, 0.0]])
        zero = np.zeros(1, np.int64)
        heat, seed, choice, position, limit = self.device.put([np.ones(1), zero, zero, zero, limits])
        logits = torch.zeros(1, self.model.config.vocab_size, device=heat.device)
        for draws in (Draws(heat, seed, choice, position), Draws(heat, seed, choice, position, limit, most=1)):
            for changes in ([], [Tensor.double]):
                self._draw(self.device.sampler, logits, PlacedDraws(draws, changes))

    def _leaves_out(self, plan: list[Work], num_wanted: int) -> bool:
        """Whether rows that nobody wants, of prompts, are spared most of the last layer."""
        whole = max(self._taps_of(plan), default=0) >= self.bounds[-1] - 1  # an EAGLE head reads it
        return not whole and sum(work.num_tokens for work in plan) - num_wanted >= WORTH_LEAVING_OUT

    def _last_layer(self, hidden: Tensor, batch: Batch, top: Top, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """The stream behind it of the rows top.rows, and where among them the wanted ones are."""
        layer = self.bounds[-1] - 1
        self.model.write_kv(hidden, batch, self.pool, layer)
        hidden = hidden[top.rows]
        if len(hidden):
            hidden = self.model.forward(hidden, top.batch, self.pool, layer, layer + 1)
        return hidden, torch.searchsorted(top.rows, wanted)

    def _logits(self, hidden: Tensor, wanted: Tensor) -> Tensor:
        if not len(wanted):
            return hidden.new_empty((0, self.model.config.vocab_size), dtype=torch.float32)
        return self.model.logits(hidden[wanted])

    def _taps_of(self, plan: list[Work]) -> tuple[int, ...]:
        """None where no sequence will ask for what they keep."""
        return self.taps if self.taps and any(work.seq.is_followed for work in plan) else ()

    def stream(self, rows: Tensor) -> Tensor:  # of `run` -> [T, hidden]
        """The residual stream without what was kept beside it."""
        return rows[:, : self.model.config.hidden_size] if self.taps else rows

    def run(self, plan: list[Work], depth: int) -> Tensor:
        """A pass through the first `depth` segments: each takes what the works owe it, from the one below and from
        what was computed before. The stream behind the last of them, work.owed(depth - 1) rows per work, in order.
        """
        return self._walk(self._stage(plan, depth, []))

    def _stage(
        self, plan: list[Work], depth: int, rest: Arrays, leaves_out: bool = False, behind: Begun | None = None
    ) -> Staged:
        """All that the host knows of a pass, brought to the device at once. `leaves_out`: the last layer takes only the
        rows rest[0]."""
        owed = [[work.owed(segment) for work in plan] for segment in range(depth)]
        starts = [segment for segment in range(depth) if not segment or owed[segment] != owed[segment - 1]]
        tokens = np.fromiter(chain.from_iterable(work.unread for work in plan), np.int64)
        batches = [plan_batch(plan, owed[start], self.block_size) for start in starts]
        if leaves_out:
            batches.append(plan_batch(plan, [rows_wanted(work) for work in plan], self.block_size))
            rest = [np.sort(rest[0]), *rest]
        placed, (there, taken, *others) = place(self.device, batches, [tokens, _taken(plan, tokens, behind), *rest])
        top = Top(placed.pop(), others.pop(0)) if leaves_out else None
        segments = [
            Segment(batch, owed[start], _waiting(plan, start), self.bounds[start], self.bounds[end])
            for batch, start, end in zip(placed, starts, [*starts[1:], depth], strict=True)
        ]
        return Staged(there, segments, self._taps_of(plan), others, Taken(behind, taken) if behind else None, top)

    @torch.inference_mode()
    def _walk(self, staged: Staged) -> Tensor:
        tokens = staged.taken.among(staged.tokens) if staged.taken else staged.tokens
        hidden, below = self.model.embed(tokens, staged.segments[0].batch.positions), staged.segments[0].counts
        end = self.bounds[-1] - 1 if staged.top else self.bounds[-1]
        for segment in staged.segments:
            if segment.waiting:
                hidden = _with_waiting(segment.waiting, hidden, below)
            hidden = self._forward(hidden, segment.batch, segment.first, min(end, segment.last), staged.taps)
            below = segment.counts
        return hidden

    def _forward(self, rows: Tensor, batch: Batch, first: int, last: int, taps: tuple[int, ...]) -> Tensor:
        if not len(rows):
            return rows
        if not taps:
            return self.model.forward(self.stream(rows), batch, self.pool, first, last)
        own = [layer for layer in taps if first <= layer < last]
        *kept, hidden = self.model.streams(self.stream(rows), batch, self.pool, first, last, own)
        if last == self.bounds[-1] == taps[-1]:
            kept.append(hidden)
        return torch.cat((hidden, rows[:, hidden.shape[1] :], *kept), 1)

    @torch.inference_mode()
    def straighten(self, results: Seq[Verified]) -> None:
        """Move the KV of accepted paths, in every layer, to where a chain of these tokens has it."""
        moves = [move for result in results if result.work.draft.parents for move in self._moves(result)]
        if moves:
            sources, targets = self.device.put([np.array(slots) for slots in zip(*moves, strict=True)])
            self.model.move(self.pool, sources, targets)

    def _moves(self, result: Verified) -> list[tuple[int, int]]:
        work = result.work
        first, size, blocks = work.end - len(work.draft.tokens), self.block_size, work.seq.blocks

        def slot(place: int) -> int:
            return blocks[place // size] * size + place % size

        return [(slot(first + node), slot(first + i)) for i, node in enumerate(result.path) if i != node]


def _taken(plan: Seq[Work], tokens: Ints, behind: Begun | None) -> Ints:  # [T] -> [T], or [0] where all are known
    """Which token of the pass behind which this one comes each UNKNOWN one is."""
    if behind is None:
        return tokens[:0]
    rows, taken = behind.rows, np.full(len(tokens), UNKNOWN, np.int64)
    taken[tokens == UNKNOWN] = [rows[work.seq] for work in plan if work.seq.tokens[-1] == UNKNOWN]
    return taken


def _waiting(plan: Seq[Work], segment: int) -> list[list[Tensor]]:
    """Rows of each work that wait for a segment; the lowest has nobody's."""
    return [list(work.seq.behind[segment - 1].chunks) for work in plan] if segment else []


def _with_waiting(waiting: Seq[Seq[Tensor]], fresh: Tensor, counts: list[int]) -> Tensor:
    """For each work the rows that have waited for a segment, and then its counts[i] rows of `fresh`. Rows of passes
    without taps are narrower: nobody asks for what they lack."""
    pieces: list[Tensor] = []
    for waited, rows in zip(waiting, fresh.split_with_sizes(counts), strict=True):
        pieces += [*waited, rows]
    width = max(piece.shape[1] for piece in pieces)
    return torch.cat([F.pad(piece, (0, width - piece.shape[1])) for piece in pieces])

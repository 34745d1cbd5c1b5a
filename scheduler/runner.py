"""Runs one plan through the model: builds the ragged batch, walks the segments, returns the logits that were asked for.

Knows tensors and positions; decides nothing.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from verdraft.kernels.base import CHAINS, Batch, LayerKV
from verdraft.kernels.tree import paths
from verdraft.model.transformer import Transformer
from verdraft.scheduler.plan import Work
from verdraft.scheduler.verifier import Rows, Verified, rows_wanted

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Passed:
    """What came out of a pass."""

    logits: Rows  # [R, V]: rows_wanted(work) rows per work, in order
    taps: Tensor | None  # [T, taps * hidden]: work.num_tokens rows per work, in order; None without taps


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

    @property
    def num_segments(self) -> int:
        return len(self.bounds) - 1

    @torch.inference_mode()
    def execute(self, plan: list[Work]) -> Passed:
        """One full-depth pass over the plan's tokens."""
        rows = self.run(plan, self.num_segments)
        hidden = self.stream(rows)
        return Passed(self._logits(hidden, plan), rows[:, hidden.shape[1] :] if self._taps_of(plan) else None)

    def _taps_of(self, plan: list[Work]) -> tuple[int, ...]:
        """None where no sequence will ask for what they keep."""
        return self.taps if self.taps and any(work.seq.is_followed for work in plan) else ()

    def stream(self, rows: Tensor) -> Tensor:  # of `run` -> [T, hidden]
        """The residual stream without what was kept beside it."""
        return rows[:, : self.model.config.hidden_size] if self.taps else rows

    @torch.inference_mode()
    def run(self, plan: list[Work], depth: int) -> Tensor:
        """A pass through the first `depth` segments: each takes what the works owe it, from the one below and from
        what was computed before. The stream behind the last of them, work.owed(depth - 1) rows per work, in order.
        """
        owed = [work.owed(0) for work in plan]
        batch = self._batch(plan, owed)
        tokens = np.fromiter(chain.from_iterable(work.unread for work in plan), np.int64)
        taps = self._taps_of(plan)
        hidden = self._forward(self.model.embed(_to(tokens, self.model.device), batch.positions), batch, 0, taps)
        for segment in range(1, depth):
            below, owed = owed, [work.owed(segment) for work in plan]
            if owed != below:
                hidden = _with_waiting(plan, segment, hidden, below)
                batch = self._batch(plan, owed)
            hidden = self._forward(hidden, batch, segment, taps)
        return hidden

    def _forward(self, rows: Tensor, batch: Batch, segment: int, taps: tuple[int, ...]) -> Tensor:
        if not len(rows):
            return rows
        first, last = self.bounds[segment], self.bounds[segment + 1]
        if not taps:
            return self.model.forward(self.stream(rows), batch, self.pool, first, last)
        own = [layer for layer in taps if first <= layer < last]
        *kept, hidden = self.model.streams(self.stream(rows), batch, self.pool, first, last, own)
        if last == self.bounds[-1] == taps[-1]:
            kept.append(hidden)
        return torch.cat((hidden, rows[:, hidden.shape[1] :], *kept), 1)

    def _batch(self, plan: list[Work], owed: list[int]) -> Batch:
        """The last owed[i] tokens of each work as ragged metadata."""
        rows = [(work, num) for work, num in zip(plan, owed, strict=True) if num]
        num = np.array([num for _, num in rows], np.int64)
        start = np.array([work.end - num for work, num in rows], np.int64)
        tables = block_tables([work.seq.blocks for work, _ in rows])
        batch = ragged_batch(num, start, tables, self.block_size, self.model.device)
        if any(work.draft.parents for work, _ in rows):
            batch = with_trees(batch, start, [_tree_of(work, num) for work, num in rows])
        return batch

    @torch.inference_mode()
    def straighten(self, results: Seq[Verified]) -> None:
        """Move the KV of accepted paths, in every layer, to where a chain of these tokens has it."""
        moves = [move for result in results if result.work.draft.parents for move in self._moves(result)]
        if moves:
            sources, targets = (_to(np.array(slots), self.model.device) for slots in zip(*moves, strict=True))
            self.model.move(self.pool, sources, targets)

    def _moves(self, result: Verified) -> list[tuple[int, int]]:
        work = result.work
        first, size, blocks = work.end - len(work.draft.tokens), self.block_size, work.seq.blocks

        def slot(place: int) -> int:
            return blocks[place // size] * size + place % size

        return [(slot(first + node), slot(first + i)) for i, node in enumerate(result.path) if i != node]

    def _logits(self, hidden: Tensor, plan: list[Work]) -> Rows:
        ends = np.cumsum([work.num_tokens for work in plan])
        rows = [np.arange(end - rows_wanted(work), end) for work, end in zip(plan, ends, strict=True)]
        wanted = np.concatenate(rows)
        if not wanted.size:
            return np.empty((0, self.model.config.vocab_size), np.float32)
        logits: Rows = self.model.logits(hidden[_to(wanted, hidden.device)]).cpu().numpy()
        return logits


def _with_waiting(plan: list[Work], segment: int, fresh: Tensor, counts: list[int]) -> Tensor:
    """For each work the rows that have waited for this segment, and then its counts[i] rows of `fresh`. Rows of passes
    without taps are narrower: nobody asks for what they lack."""
    pieces: list[Tensor] = []
    for work, rows in zip(plan, fresh.split_with_sizes(counts), strict=True):
        pieces += [*work.seq.behind[segment - 1].chunks, rows]
    width = max(piece.shape[1] for piece in pieces)
    return torch.cat([F.pad(piece, (0, width - piece.shape[1])) for piece in pieces])


def _tree_of(work: Work, num: int) -> list[int]:
    """Parents among the last `num` tokens of a work. No tree is computed in some segments only, so all of its nodes
    and the token before them are among these."""
    parents = list(range(-1, num - 1))
    if work.draft.parents:
        first = num - len(work.draft.tokens)
        parents[first:] = [first + parent if parent >= 0 else first - 1 for parent in work.draft.parents]
    return parents


def with_trees(batch: Batch, start: Ints, trees: Seq[Seq[int]]) -> Batch:
    """Every token follows its parent, in row b as trees[b] tells; slots stay as they are."""
    positions = [
        first + len(path) - 1 for first, tree in zip(start.tolist(), trees, strict=True) for path in paths(tree)
    ]
    parents = np.fromiter(chain.from_iterable(trees), np.int32)
    device = batch.positions.device
    return replace(batch, parents=_to(parents, device), positions=_to(np.array(positions, np.int64), device))


def ragged_batch(num: Ints, start: Ints, tables: Ints, block_size: int, device: torch.device) -> Batch:
    """num[b] tokens from position start[b] on, in the blocks tables[b] [B, P]. Slots come from the block tables,
    never from "the last one plus one"."""
    ends = np.cumsum(num)
    owner = np.repeat(np.arange(len(num)), num)
    positions = np.arange(len(owner)) - np.repeat(ends - num - start, num)
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    return Batch(
        cu_q=_to(np.concatenate(([0], ends)).astype(np.int32), device),
        seq_lens=_to((start + num).astype(np.int32), device),
        pages=_to(tables.astype(np.int32), device),
        slots=_to(slots, device),
        positions=_to(positions, device),
        max_q=int(num.max(initial=0)),
        max_k=int((start + num).max(initial=0)),
        parents=CHAINS.to(device),
    )


def block_tables(blocks: Seq[Seq[int]]) -> Ints:
    """[B, P], padded with block 0."""
    tables = np.zeros((len(blocks), max(map(len, blocks), default=0)), np.int64)
    for row, own in zip(tables, blocks, strict=True):
        row[: len(own)] = own
    return tables


def _to(array: NDArray[np.integer], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)

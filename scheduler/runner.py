"""Runs one plan through the model: builds the ragged batch, walks the segments, returns the logits that were asked for.

Knows tensors and positions; decides nothing.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verdraft.kernels.base import Batch, LayerKV
from verdraft.model.transformer import Transformer
from verdraft.scheduler.plan import Work
from verdraft.scheduler.verifier import Rows, rows_wanted

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Runner:
    """`bounds` are the layer indices between segments: (0, L) without exits, (0, L_d, L_i, L) with two."""

    model: Transformer
    pool: Seq[LayerKV]
    block_size: int
    bounds: tuple[int, ...]

    @torch.inference_mode()
    def execute(self, plan: list[Work]) -> Rows:
        """One full-depth pass over the plan's tokens; logits [R, V] of rows_wanted(work) rows per work, in order."""
        batch = build_batch(plan, self.block_size, self.model.device)
        tokens = np.concatenate([np.asarray(work.tokens, np.int64) for work in plan])
        return self._logits(self.forward(_to(tokens, self.model.device), batch), plan)

    def forward(self, tokens: Tensor, batch: Batch) -> Tensor:  # [T] int64 -> [T, hidden]
        """All segments, one after the other."""
        hidden = self.model.embed(tokens, batch.positions)
        for first, last in pairwise(self.bounds):
            hidden = self.model.forward(hidden, batch, self.pool, first, last)
        return hidden

    def _logits(self, hidden: Tensor, plan: list[Work]) -> Rows:
        ends = np.cumsum([work.num_tokens for work in plan])
        rows = [np.arange(end - rows_wanted(work), end) for work, end in zip(plan, ends, strict=True)]
        wanted = np.concatenate(rows)
        if not wanted.size:
            return np.empty((0, self.model.config.vocab_size), np.float32)
        logits: Rows = self.model.logits(hidden[_to(wanted, hidden.device)]).cpu().numpy()
        return logits


def build_batch(plan: list[Work], block_size: int, device: torch.device) -> Batch:
    """The plan as ragged metadata."""
    num = np.array([work.num_tokens for work in plan], np.int64)
    start = np.array([work.start for work in plan], np.int64)
    return ragged_batch(num, start, _block_tables(plan), block_size, device)


def ragged_batch(num: Ints, start: Ints, tables: Ints, block_size: int, device: torch.device) -> Batch:
    """num[b] tokens from position start[b] on, in the blocks tables[b] [B, P]. Slots come from the block tables,
    never from "the last one plus one"."""
    ends = np.cumsum(num)
    owner = np.repeat(np.arange(len(num)), num)
    positions = np.arange(ends[-1]) - np.repeat(ends - num - start, num)
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    return Batch(
        cu_q=_to(np.concatenate(([0], ends)).astype(np.int32), device),
        seq_lens=_to((start + num).astype(np.int32), device),
        pages=_to(tables.astype(np.int32), device),
        slots=_to(slots, device),
        positions=_to(positions, device),
        max_q=int(num.max()),
        max_k=int((start + num).max()),
    )


def _block_tables(plan: list[Work]) -> Ints:
    tables = np.zeros((len(plan), max(len(work.seq.blocks) for work in plan)), np.int64)
    for row, work in zip(tables, plan, strict=True):
        row[: len(work.seq.blocks)] = work.seq.blocks
    return tables


def _to(array: NDArray[np.integer], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)

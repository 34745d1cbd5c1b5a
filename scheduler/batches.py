"""Ragged metadata of a pass, built on the host as arrays; where they go is another file's business (device.py)."""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verdraft.kernels.base import Batch
from verdraft.kernels.tree import paths
from verdraft.scheduler.device import Device
from verdraft.scheduler.plan import Work

Ints = NDArray[np.int64]
Tables = NDArray[np.signedinteger]
Arrays = list[NDArray[np.generic]]
_CHAINS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A Batch whose tensors are arrays still."""

    cu_q: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    pages: NDArray[np.int32]
    slots: Ints
    positions: Ints
    parents: NDArray[np.int32]
    max_q: int
    max_k: int

    @property
    def arrays(self) -> Arrays:
        """What has to be where the model computes."""
        return [self.cu_q, self.seq_lens, self.pages, self.slots, self.positions, self.parents]

    def placed(self, tensors: Seq[Tensor]) -> Batch:
        """The Batch of these arrays' tensors, which come in the same order."""
        cu_q, seq_lens, pages, slots, positions, parents = tensors
        return Batch(cu_q, seq_lens, pages, slots, positions, self.max_q, self.max_k, parents)


def ragged(num: Ints, start: Ints, tables: Tables, block_size: int) -> HostBatch:
    """num[b] tokens from position start[b] on, in the blocks tables[b] [B, P]. Slots come from the block tables,
    never from "the last one plus one"."""
    ends = np.cumsum(num)
    owner = np.repeat(np.arange(len(num)), num)
    positions = np.arange(len(owner)) - np.repeat(ends - num - start, num)
    return HostBatch(
        cu_q=np.concatenate(([0], ends)).astype(np.int32),
        seq_lens=(start + num).astype(np.int32),
        pages=tables.astype(np.int32, copy=False),
        slots=tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size,
        positions=positions,
        parents=_CHAINS,
        max_q=int(num.max(initial=0)),
        max_k=int((start + num).max(initial=0)),
    )


def ragged_batch(num: Ints, start: Ints, tables: Tables, block_size: int, device: torch.device) -> Batch:
    """`ragged`, on a device, one copy an array: for whoever does not count them."""
    batch = ragged(num, start, tables, block_size)
    return batch.placed([torch.from_numpy(array).to(device) for array in batch.arrays])


def place(device: Device, batches: Seq[HostBatch], others: Arrays) -> tuple[list[Batch], list[Tensor]]:
    """All of these on the device, which gets them at once."""
    pieces = [batch.arrays for batch in batches]
    tensors = iter(device.put([*chain.from_iterable(pieces), *others]))
    placed = [batch.placed([next(tensors) for _ in piece]) for batch, piece in zip(batches, pieces, strict=True)]
    return placed, list(tensors)


def with_trees(batch: HostBatch, start: Ints, trees: Seq[Seq[int]]) -> HostBatch:
    """Every token follows its parent, in row b as trees[b] tells; slots stay as they are."""
    positions = [
        first + len(path) - 1 for first, tree in zip(start.tolist(), trees, strict=True) for path in paths(tree)
    ]
    parents = np.fromiter(chain.from_iterable(trees), np.int32)
    return replace(batch, parents=parents, positions=np.array(positions, np.int64))


def block_tables(blocks: Seq["array[int]"]) -> Tables:
    """[B, P], padded with block 0."""
    tables = np.zeros((len(blocks), max(map(len, blocks), default=0)), np.int32)
    for row, own in zip(tables, blocks, strict=True):
        row[: len(own)] = own
    return tables


def plan_batch(plan: Seq[Work], owed: Seq[int], block_size: int) -> HostBatch:
    """The last owed[i] tokens of each work."""
    rows = [(work, num) for work, num in zip(plan, owed, strict=True) if num]
    num = np.array([num for _, num in rows], np.int64)
    start = np.array([work.end - num for work, num in rows], np.int64)
    batch = ragged(num, start, block_tables([work.seq.blocks for work, _ in rows]), block_size)
    if any(work.draft.parents for work, _ in rows):
        batch = with_trees(batch, start, [_tree_of(work, num) for work, num in rows])
    return batch


def _tree_of(work: Work, num: int) -> list[int]:
    """Parents among the last `num` tokens of a work. No tree is computed in some segments only, so all of its nodes
    and the token before them are among these."""
    parents = list(range(-1, num - 1))
    if work.draft.parents:
        first = num - len(work.draft.tokens)
        parents[first:] = [first + parent if parent >= 0 else first - 1 for parent in work.draft.parents]
    return parents

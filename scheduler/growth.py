"""Runs an EAGLE head for many sequences in lockstep: over what the target computed, then over what is drafted.

Everything here is draft side, free to be wrong. Rows of drafted tokens use slots that the next real rows overwrite.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verdraft.kernels.base import LayerKV
from verdraft.model.eagle import EagleHead
from verdraft.scheduler.batches import HostBatch, block_tables, place, ragged, with_trees
from verdraft.scheduler.device import Device
from verdraft.scheduler.features import Features
from verdraft.scheduler.hearing import Asked, Listener, Peak
from verdraft.scheduler.sequence import Sequence
from verdraft.scheduler.verifier import NO_TOKEN, Law
from verdraft.spec.calibration import Calibration
from verdraft.spec.growing import Branch, Growing


class SeenBlocks:
    """Which blocks hold the drafter's KV of which tokens, so that those of the prefix cache need no recomputation.

    The row of a block's last token saw the token behind it in whichever sequence came first: a draft may suffer a
    little, and the two have one tenant.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._key_of: dict[int, bytes] = {}

    def reach(self, seq: Sequence, start: int) -> int:
        """The beginning of the block from which on all up to `start` are seen; if none, the next block's."""
        first = -(-start // self._size)
        if start % self._size == 0:
            keys = seq.block_keys(self._size, first)
            while first > 0 and self._key_of.get(seq.blocks[first - 1]) == keys[first - 1]:
                first -= 1
        return first * self._size

    def discard(self, seq: Sequence, start: int, end: int) -> None:
        """Rows at positions [start, end) are about to be written."""
        for block in seq.blocks[start // self._size : -(-end // self._size)]:
            self._key_of.pop(block, None)

    def add(self, seq: Sequence, start: int, end: int) -> None:
        """Committed tokens at positions [start, end) have their rows, and so have all before them that count."""
        full = end // self._size
        keys = seq.block_keys(self._size, full)
        for i in range(start // self._size, full):
            self._key_of[seq.blocks[i]] = keys[i]


@dataclass(slots=True)
class Growth:
    """One sequence and its draft. `inputs` are the features of the drafted nodes that were looked behind."""

    seq: Sequence
    features: Features
    growing: Growing
    inputs: list[Tensor] = field(default_factory=list)  # each [1, hidden]
    outputs: dict[int, Tensor] = field(default_factory=dict)  # by node, -1 the committed text: [1, hidden]


@dataclass(frozen=True, slots=True)
class DraftGrower:
    """The head, its KV and the rules of choosing. Owns no state of sequences."""

    head: EagleHead
    listener: Listener
    pool: Seq[LayerKV]
    block_size: int
    vocab_size: int
    law: Law
    calibration: Calibration
    seen: "SeenBlocks"
    device: Device

    def extend(self, seqs: Seq[Sequence]) -> None:
        """Compute every waiting row of these sequences; `features.last` is then that of their newest position."""
        seqs = [seq for seq in seqs if seq.features and seq.features.waiting]
        if not seqs:
            return
        known = [seq.features for seq in seqs if seq.features]
        counts = [features.end - features.computed for features in known]
        tokens = [seq.tokens[f.computed + 1 : f.end + 1] for seq, f in zip(seqs, known, strict=True)]
        starts = [features.computed - features.first for features in known]
        fused = self.head.fuse(torch.cat(list(chain.from_iterable(features.waiting for features in known))))
        hidden = self._forward(fused, list(chain.from_iterable(tokens)), self._batch(seqs, known, counts, starts))
        for seq, features, end in zip(seqs, known, np.cumsum(counts).tolist(), strict=True):
            self.seen.add(seq, features.computed, features.end)
            features.settle(hidden[end - 1 : end].clone())

    def grow(self, growths: Seq[Growth], goes_on: Callable[[Seq[Growth]], list[bool]]) -> None:
        """Level by level, as long as `goes_on` says. The sequences are extended already."""
        active = list(growths)
        for growth in active:
            assert growth.features.last is not None
            growth.outputs[-1] = growth.features.last
        while active:
            self._branch(active)
            active = [growth for growth in active if growth.growing.frontier]
            active = [growth for growth, more in zip(active, goes_on(active), strict=True) if more]
            if active:
                self._look(active)

    def _branch(self, growths: Seq[Growth]) -> None:
        """Children of every frontier node."""
        nodes = [(growth, node) for growth in growths for node in growth.growing.frontier]
        asked = [Asked(i, g.seq, len(g.growing.path(node))) for i, (g, node) in enumerate(nodes)]
        peaks = iter(self.listener.peaks(torch.cat([growth.outputs[node] for growth, node in nodes]), asked))
        for growth in growths:
            growing = growth.growing
            growing.branch([self._children(growth.seq, growing, node, next(peaks)) for node in growing.frontier])

    def _look(self, growths: Seq[Growth]) -> None:
        """The drafter's output at every frontier node. A tree's earlier nodes are computed again beside them, because
        only within a pass can one say which keys a row is not to see."""
        rows, counts, starts, tokens, trees = [], [], [], [], []
        for growth in growths:
            growing = growth.growing
            nodes = [*growing.looked, *growing.frontier]
            growth.inputs += [growth.outputs[growing.parents[node]] for node in growing.frontier]
            new = len(nodes) if growing.topk > 1 else 1
            rows += growth.inputs[-new:]
            counts.append(new)
            starts.append(growth.features.computed - growth.features.first + len(nodes) - new)
            tokens += [growing.tokens[node] for node in nodes[-new:]]
            place = {node: i for i, node in enumerate(nodes)}
            trees.append([place.get(growing.parents[node], -1) for node in nodes] if growing.topk > 1 else [-1])
        batch = self._batch([g.seq for g in growths], [g.features for g in growths], counts, starts)
        if any(len(tree) > 1 for tree in trees):
            batch = with_trees(batch, np.array(starts, np.int64), trees)
        hidden = self._forward(torch.cat(rows), tokens, batch)
        for growth, end in zip(growths, np.cumsum(counts).tolist(), strict=True):
            frontier = growth.growing.frontier
            first = end - len(frontier)
            growth.outputs |= {node: hidden[first + i, None].clone() for i, node in enumerate(frontier)}

    def _children(self, seq: Sequence, growing: Growing, node: int, peak: Peak) -> list[Branch]:
        """The law's own choice at this head first: the same noise and parameters as the target's, by position."""
        path = growing.path(node)
        try:
            tokens, shares = self._leading(seq, path, peak, growing.topk)
        except NO_TOKEN:  # at a head of few tokens, or one that fails
            return []
        pairs = zip(tokens.tolist(), shares.tolist(), strict=True)
        return [Branch(token, share, self.calibration.of(share)) for token, share in pairs]

    def _leading(
        self, seq: Sequence, path: list[int], peak: Peak, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.floating]]:
        if self.law.leaves_raw(seq, len(path)):
            if seq.request.params.temperature > 0.0:
                return self.law.leading(seq, len(path), peak.values, count, peak.names)
            return peak.likeliest(count)
        full = np.full(self.vocab_size, -np.inf, np.float32)
        full[peak.names] = peak.values
        for token in path:
            seq.push(token)
        try:
            return self.law.leading(seq, len(path), full, count)
        finally:
            for _ in path:
                seq.pop()

    def _forward(self, features: Tensor, tokens: list[int], batch: HostBatch) -> Tensor:
        (placed,), (ids,) = place(self.device, [batch], [np.array(tokens, np.int64)])
        return self.head.forward(features, ids, placed, self.pool)

    def _batch(self, seqs: Seq[Sequence], known: Seq[Features], counts: list[int], starts: list[int]) -> HostBatch:
        """The context begins at `features.first`, and so do positions: rope knows distances alone."""
        for seq, features, count, start in zip(seqs, known, counts, starts, strict=True):
            self.seen.discard(seq, features.first + start, features.first + start + count)
        tables = block_tables(
            [seq.blocks[features.first // self.block_size :] for seq, features in zip(seqs, known, strict=True)]
        )
        return ragged(np.array(counts), np.array(starts), tables, self.block_size)

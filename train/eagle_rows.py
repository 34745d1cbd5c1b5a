"""Recorded sequences as an EAGLE3 head learns from them: streams, tokens, and what the target thought likely next."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from verdraft.train.collect import TEMPERATURES
from verdraft.train.distil import CHUNK, Target, columns_of

LIKELY = 16  # tokens of the target's distribution that are kept


@dataclass(frozen=True, slots=True)
class Rows:
    """Recorded sequences, one after the other; row t of one stands for its position t."""

    numbers: Tensor  # [sequences]: of their prompts
    lengths: Tensor  # [sequences]
    aux: Tensor  # [n, 3 * hidden] half: the streams that a feature is made of
    final: Tensor  # [n, hidden] half: what the target's head reads
    next: Tensor  # [n]: the token behind each row
    own: Tensor  # [n] bool: the model wrote that token
    likely: Tensor  # [n, LIKELY]: columns of the vocabulary, the likeliest for that token, best first
    shares: Tensor  # [n, LIKELY]: their probabilities
    first: Tensor  # [n]: the column of the target's first choice; -1: it is outside the vocabulary

    @property
    def greedy(self) -> Tensor:  # bool [sequences]
        """Which were written at temperature 0."""
        return torch.tensor(TEMPERATURES)[self.numbers % len(TEMPERATURES)] == 0

    @property
    def ends(self) -> Tensor:  # [sequences]
        """The row behind each sequence."""
        return self.lengths.cumsum(0)

    @property
    def anchors(self) -> Tensor:  # [A] ascending
        """Rows that drafting can start from, as two tokens follow; the model need not have written these."""
        return torch.nonzero(self.room(torch.arange(len(self.own))) > 0).squeeze(1)

    @property
    def own_anchors(self) -> Tensor:  # [A] ascending
        """Those where the model wrote both."""
        return self.anchors[self.own[self.anchors]]

    def owners(self, rows: Tensor) -> Tensor:  # [A] -> [A]
        """Which sequence each row is of."""
        return torch.searchsorted(self.ends, rows, right=True)

    def room(self, rows: Tensor) -> Tensor:  # [A] -> [A]
        """How many rows of its sequence follow each."""
        return self.ends[self.owners(rows)] - rows - 1

    def part(self, chosen: Sequence[int]) -> "Rows":
        """Some of the sequences, in this order."""
        spans = zip((self.ends - self.lengths)[list(chosen)].tolist(), self.ends[list(chosen)].tolist(), strict=True)
        rows = torch.cat([torch.arange(begin, end) for begin, end in spans])
        columns = [getattr(self, field.name)[rows] for field in fields(self)[2:]]
        return Rows(self.numbers[list(chosen)], self.lengths[list(chosen)], *columns)

    def groups(self, chosen: Sequence[int], size: int) -> Iterator[list[int]]:
        """The sequences `chosen` in this order, in groups of at least `size` anchors but for the last."""
        counts = torch.bincount(self.owners(self.anchors), minlength=len(self.lengths)).tolist()
        waiting, found = list[int](), 0
        for number in chosen:
            waiting, found = [*waiting, number], found + counts[number]
            if found >= size:
                yield waiting
                waiting, found = [], 0
        if found:
            yield waiting


def load_rows(paths: Sequence[Path], layers: Sequence[int], target: Target) -> Rows:
    """All sequences of some shards (train/collect.py), judged by the target over its vocabulary."""
    columns = list(zip(*(_load(path, layers, target) for path in paths), strict=True))
    return Rows(*(torch.cat(columns.pop(0)) for _ in fields(Rows)))  # popped: no column stays twice in memory


def _load(path: Path, layers: Sequence[int], target: Target) -> tuple[Tensor, ...]:
    with safe_open(str(path), framework="pt") as shard:
        aux = torch.cat([shard.get_tensor(f"layer.{layer}") for layer in layers], -1)
        final, lse, argmax, following, own, sequence = (
            shard.get_tensor(name) for name in ("final", "lse", "argmax", "next", "own", "sequence")
        )
    numbers, lengths = sequence.unique_consecutive(return_counts=True)
    judged = [_likely(part, some, target) for part, some in zip(final.split(CHUNK), lse.split(CHUNK), strict=True)]
    likely, shares = (torch.cat(column) for column in zip(*judged, strict=True))
    first = columns_of(target.token_ids, argmax)
    return numbers, lengths, aux, final, following.long(), own, likely, shares, first


@torch.no_grad()
def _likely(final: Tensor, lse: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    logits = F.linear(final.to(target.rows), target.rows)
    best, columns = logits.topk(min(LIKELY, len(target.token_ids)), -1)
    return columns.cpu(), (best - lse.to(best)[:, None]).exp().cpu()

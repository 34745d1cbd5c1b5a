"""The model: embedding, one forward over a range of layers, head. Knows tokens, pages and nothing of requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verdraft.kernels.base import Batch, FusedLayers, Kernels, LayerKV
from verdraft.model.config import ModelConfig
from verdraft.model.layers import Layer, Norm, Positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A decoder-only language model; made by `load_model`. The caller sets torch.inference_mode."""

    config: ModelConfig
    kernels: Kernels
    embedding: Tensor  # [vocab, hidden]
    positions: Positions
    layers: Sequence[Layer]
    fused: FusedLayers | None = None  # the same layers, where the backend computes several at once
    final_norm: Norm
    head: Any  # packed [vocab, hidden]
    num_parts: int = 1  # processes that share every layer; this one has its part of the heads

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token's K and V take in the pool, all layers together."""
        return 2 * self.config.num_layers * self._kv_heads * self.config.head_dim * self.dtype.itemsize

    @property
    def _kv_heads(self) -> int:
        return self.config.num_kv_heads // self.num_parts

    def new_pool(self, num_blocks: int, block_size: int) -> Sequence[LayerKV]:
        """A KV pool of `num_blocks` pages of `block_size` tokens: one entry per layer."""
        config = self.config
        return self.kernels.pool(
            config.num_layers, num_blocks, block_size, self._kv_heads, config.head_dim, self.dtype, self.device
        )

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:  # [T] int64, [T] int64 -> [T, hidden]
        """The residual stream before layer 0."""
        return self.positions.embed(F.embedding(tokens, self.embedding), positions)

    def forward(
        self, hidden: Tensor, batch: Batch, pool: Sequence[LayerKV], first: int, last: int
    ) -> Tensor:  # [T, hidden] -> [T, hidden]
        """Run layers [first, last) and write their KV; both ends are the plain residual stream (DESIGN section 4)."""
        if self.fused is not None and first < last:
            return self.fused(hidden, batch, pool, first, last, ())[-1]
        place = self.positions.placing(batch.positions)
        for index in range(first, last):
            hidden = self.layers[index](hidden, batch, pool[index], place)
        return hidden

    def write_kv(self, hidden: Tensor, batch: Batch, pool: Sequence[LayerKV], layer: int) -> None:  # [T, hidden]
        """What `forward` through this one layer writes, for tokens of which nobody wants what leaves it."""
        self.layers[layer].write_kv(hidden, batch, pool[layer], self.positions.placing(batch.positions))

    def streams(
        self, hidden: Tensor, batch: Batch, pool: Sequence[LayerKV], first: int, last: int, taps: Sequence[int]
    ) -> list[Tensor]:
        """As `forward`; before what it gives, the streams that enter the layers `taps`, ascending in [first, last)."""
        if self.fused is not None and first < last:
            return self.fused(hidden, batch, pool, first, last, taps)
        kept = []
        for layer in taps:
            hidden, first = self.forward(hidden, batch, pool, first, layer), layer
            kept.append(hidden)
        return [*kept, self.forward(hidden, batch, pool, first, last)]

    def move(self, pool: Sequence[LayerKV], sources: Tensor, targets: Tensor) -> None:
        """Copy the KV of the slots `sources` [N] to `targets` [N] in every layer; see Kernels.move."""
        for layer_kv in pool:
            self.kernels.move(layer_kv, sources, targets)

    def check(self) -> None:
        """Raise ModelError when what was computed is worth nothing, although it came; after waiting for it."""

    def logits(self, hidden: Tensor) -> Tensor:  # [R, hidden] -> [R, vocab] float32
        """Final norm and head, on the residual stream behind the last layer."""
        return self.kernels.linear(self.final_norm(hidden), self.head).float()

"""One transformer layer and the ways a token gets its position. Weights are packed already; no file is known here."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch.nn.functional as F
from torch import Tensor

from verdraft.kernels.base import Batch, Kernels, LayerForm, LayerKV, LayerWeights
from verdraft.model.part import WHOLE, Part

Norm: TypeAlias = Callable[[Tensor], Tensor]
AddNorm: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # adds the second to the first, in place; the norm of the sum
Place: TypeAlias = Callable[[Tensor, Tensor, Tensor, LayerKV, Tensor], None]  # rotates q; k and v into the pool's slots
Prepare: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # q, k before rotation


@dataclass(frozen=True, slots=True)
class Heads:
    """How a fused projection splits into query, key and value heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # [T, (heads + 2 kv_heads) * dim]
        """q [T, heads, dim], k and v [T, kv_heads, dim]: views with strided rows."""
        rows = qkv.view(qkv.shape[0], -1, self.head_dim)
        q, k, v = rows.split_with_sizes((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
        return q, k, v


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Attention and MLP, each behind a norm and added to the residual stream."""

    kernels: Kernels
    heads: Heads
    attention_norm: Norm
    qkv: Any  # packed
    prepare: Prepare  # the per-head norms of Qwen3, or nothing
    output: Any  # packed
    mlp_norm: AddNorm
    up: Any  # packed; [gate | up] for SwiGLU
    activation: Callable[[Tensor], Tensor]
    down: Any  # packed
    gather: Callable[[Tensor], Tensor] = WHOLE.gather

    def __call__(self, hidden: Tensor, batch: Batch, layer_kv: LayerKV, place: Place) -> Tensor:  # [T, hidden]
        """The residual stream behind this layer; `hidden` itself is left as it was."""
        return self.add_to(hidden, self.attention_norm(hidden), batch, layer_kv, place)

    def add_to(self, residual: Tensor, normed: Tensor, batch: Batch, layer_kv: LayerKV, place: Place) -> Tensor:
        """`residual` [T, hidden] and what this layer adds to it when its attention reads `normed` [T, in]."""
        linear = self.kernels.linear
        gather = self.gather
        attended = gather(self._attend(linear(normed, self.qkv), batch, layer_kv, place))
        hidden = gather(linear(attended, self.output))
        inner = gather(self.activation(linear(self.mlp_norm(hidden, residual), self.up)))
        return gather(linear(inner, self.down)).add_(hidden)

    def write_kv(self, hidden: Tensor, batch: Batch, layer_kv: LayerKV, place: Place) -> None:
        """Only what this layer keeps of `hidden` [T, hidden] for later tokens."""
        q, k, v = self.heads.split(self.kernels.linear(self.attention_norm(hidden), self.qkv))
        q, k = self.prepare(q, k)
        place(q, k, v, layer_kv, batch.slots)

    def _attend(self, qkv: Tensor, batch: Batch, layer_kv: LayerKV, place: Place) -> Tensor:  # [T, heads * dim]
        q, k, v = self.heads.split(qkv)
        q, k = self.prepare(q, k)
        place(q, k, v, layer_kv, batch.slots)
        attended = self.kernels.attend(q, layer_kv, batch, self.heads.head_dim**-0.5)
        return attended.view(attended.shape[0], -1)


def llama_layer(kernels: Kernels, weights: LayerWeights, form: LayerForm, part: Part = WHOLE) -> Layer:
    """A layer of single operations. Of a part, the heads are its own."""

    def norm(weight: Tensor) -> Norm:
        return partial(kernels.rms_norm, weight=weight, eps=form.eps)

    return Layer(
        kernels=kernels,
        heads=Heads(form.num_heads, form.num_kv_heads, form.head_dim),
        attention_norm=norm(weights.attention_norm),
        qkv=weights.qkv,
        prepare=head_norms(*map(norm, weights.head_norms)) if weights.head_norms else no_head_norm,
        output=weights.output,
        mlp_norm=partial(kernels.add_rms_norm, weight=weights.mlp_norm, eps=form.eps),
        up=weights.up,
        activation=kernels.silu_mul,
        down=weights.down,
        gather=part.gather,
    )


class Positions(Protocol):
    """How tokens get their positions: rotation in every layer, or vectors added to the embedding."""

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """hidden [T, hidden] with what the model adds for positions [T]."""
        ...

    def placing(self, positions: Tensor) -> Place:
        """What puts keys at positions [T], prepared once for all layers of a pass."""
        ...


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """Rope; cos and sin are tables [max_model_len, dim / 2] float32."""

    kernels: Kernels
    cos: Tensor
    sin: Tensor

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden

    def placing(self, positions: Tensor) -> Place:
        return partial(self.kernels.rope_write, cos=self.cos[positions], sin=self.sin[positions])


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """OPT: a trained vector per position; the first two rows of its table belong to no position."""

    kernels: Kernels
    table: Tensor  # [2 + max_model_len, hidden]

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden + F.embedding(positions + 2, self.table)

    def placing(self, positions: Tensor) -> Place:
        return self._write

    def _write(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: LayerKV, slots: Tensor) -> None:
        self.kernels.write(k, v, layer_kv, slots)


def after_adding(norm: Norm) -> AddNorm:
    """The plain way from a norm to one that adds first."""
    return lambda x, residual: norm(x.add_(residual))


def no_head_norm(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys as they are."""
    return q, k


def head_norms(q_norm: Norm, k_norm: Norm) -> Prepare:
    """Norms over every head of queries and keys."""
    return lambda q, k: (_each_head(q_norm, q), _each_head(k_norm, k))


def _each_head(norm: Norm, x: Tensor) -> Tensor:  # [T, heads, dim]
    return norm(x.reshape(-1, x.shape[-1])).view(x.shape)

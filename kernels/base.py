"""What every kernel backend offers. Pure functions on tensors: no layer, model or request is known here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor, device, dtype

LayerKV: TypeAlias = Any  # one layer's K and V pages; only the backend that made it knows the layout
CHAINS: Final = torch.empty(0, dtype=torch.int32)  # of Batch.parents: every query follows the one before it


@dataclass(frozen=True, slots=True)
class Batch:
    """One pass's ragged queries over pages, shared by all layers. Row b owns queries [cu_q[b], cu_q[b+1]).

    Query i of row b has place seq_lens[b] - q_len(b) + i in the context and sees the keys 0 to its place
    (causal, aligned at the bottom right). With `parents` the queries of a row are a tree (tree.py): each sees the keys
    before this pass, its ancestors and itself, and gets the bits that it has in a chain of these alone.
    """

    cu_q: Tensor  # [B+1] int32
    seq_lens: Tensor  # [B] int32: tokens in the context including this pass's own
    pages: Tensor  # [B, P] int32: block table, entries beyond the context are arbitrary
    slots: Tensor  # [T] int64: page * page_size + offset of every query token
    positions: Tensor  # [T] int64: absolute position of every query token
    max_q: int
    max_k: int
    parents: Tensor = CHAINS  # [T] int32: an earlier query of the same row, -1: the token before this pass; or CHAINS


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer of Llama's form: RMSNorm, attention with rope, RMSNorm, SwiGLU, each half added to its input."""

    attention_norm: Tensor  # [hidden]
    qkv: Any  # packed, as the following
    head_norms: tuple[Tensor, Tensor] | None  # [dim] each, over every head of q and of k before rope
    output: Any
    mlp_norm: Tensor  # [hidden]
    up: Any  # [gate | up]
    down: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """What all layers of a model share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float  # of the norms
    cos: Tensor  # [positions, dim / 2] float32
    sin: Tensor  # [positions, dim / 2] float32


# hidden [T, hidden], the batch, one LayerKV per layer, first, last (exclusive), and layers of these, ascending: what
# enters each of them, and what leaves the last; new tensors
FusedLayers: TypeAlias = Callable[[Tensor, Batch, Sequence[LayerKV], int, int, Sequence[int]], list[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterWeights:
    """An EAGLE head's layer (model/eagle.py): its attention reads [embedding | feature], each behind a norm."""

    layer: LayerWeights  # attention_norm is the feature's
    embedding: Tensor  # [vocab, hidden]
    embedding_norm: Tensor  # [hidden]
    final_norm: Tensor | None  # [hidden]: over what leaves
    adds_to_normed: bool  # the layer adds to the normed feature


# features [T, hidden], the ids [T] int64 behind them, the batch, its pages: [T, hidden]
FusedDrafter: TypeAlias = Callable[[Tensor, Tensor, Batch, LayerKV], Tensor]


class KernelUnavailable(RuntimeError):
    """An explicitly chosen backend cannot run here; the message says why."""


class Kernels(Protocol):
    """One backend. All activations are 2-D [tokens, features] or 3-D [tokens, heads, dim]: each token's row is
    contiguous, the rows may be strided (q, k and v can be views into one fused product)."""

    name: str
    page_size: int  # tokens in a page, unless somebody wants another number
    page_sizes: tuple[int, ...]  # those allowed; empty = any
    graphs: bool  # reads all sizes but the largest from memory and never waits: a pass may be recorded and replayed
    exact: bool  # rows never depend on batch mates, query length or chunking, bit for bit

    def pool(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: dtype,
        device: device,
    ) -> Sequence[LayerKV]:
        """Allocate the KV pool: one LayerKV per layer."""
        ...

    def write(self, k: Tensor, v: Tensor, layer_kv: LayerKV, slots: Tensor) -> None:
        """Store k, v [T, kv_heads, dim] at `slots`. What is not finite, now or where a slot is reused, makes NaN of the
        rows that see it in `attend`, and of no others."""
        ...

    def move(self, layer_kv: LayerKV, sources: Tensor, targets: Tensor) -> None:
        """Copy K and V of the slots `sources` [N] to the slots `targets` [N], as if all were read before any is
        written: an accepted path of a tree becomes a chain."""
        ...

    def attend(self, q: Tensor, layer_kv: LayerKV, batch: Batch, scale: float) -> Tensor:
        """Causal GQA attention of q [T, heads, dim] over the pages; returns [T, heads, dim]."""
        ...

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate q [T, heads, dim] and k [T, kv_heads, dim] in place; cos, sin are [T, dim/2], halves layout
        (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
        ...

    def rope_write(
        self, q: Tensor, k: Tensor, v: Tensor, layer_kv: LayerKV, slots: Tensor, cos: Tensor, sin: Tensor
    ) -> None:
        """`rope`, then `write`; k itself may stay as it was."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `residual` to x in place; returns RMSNorm of the sum."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """LayerNorm over the last dimension."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up [T, 2 * inner] = [gate | up]; returns [T, inner]."""
        ...

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Prepare a weight [out, in] once for `linear`."""
        ...

    def pack_rounded(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Prepare a drafter's weight [out, in] for `linear`: it may be wrong, so whatever is quickest will do. Rows
        are as independent as of other weights. Raises KernelUnavailable for weights that cannot be rounded."""
        ...

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        """x [T, in] times the packed weight: [T, out]."""
        ...

    def fuse(self, layers: Sequence[LayerWeights], form: LayerForm) -> FusedLayers | None:
        """A range of these layers in one call, with the bits of the single operations; None: not offered."""
        ...

    def fuse_drafter(self, weights: DrafterWeights, form: LayerForm) -> FusedDrafter | None:
        """Such a layer in one call, with the bits of the single operations; None: not offered."""
        ...

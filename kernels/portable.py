"""The CPU backend's operations in plain torch, one row at a time, for machines without a C++ compiler.

Slow but as exact as the native ones: a row is always computed alone, so nothing can stand beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from verdraft.kernels.base import Batch
from verdraft.kernels.blocks import GROUP, Blocks
from verdraft.kernels.torch_ref import TorchKernels, TorchKV, TorchLinear
from verdraft.kernels.tree import paths


@dataclass(frozen=True, slots=True)
class TorchBlocks:
    """A weight in blocks for inputs that are rounded, group by group."""

    q: Tensor  # [groups, 32, outs] whole numbers
    scale: Tensor  # [groups, outs]
    minimum: Tensor | None  # [groups, outs]; None for 8 bits
    bias: Tensor  # [outs]
    ins: int


class PortableOps:
    """The operations of `Kernels`, fp32 on the CPU."""

    def __init__(self) -> None:
        self._torch = TorchKernels()

    def pool(self, layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int) -> Sequence[TorchKV]:
        device = torch.device("cpu")
        return self._torch.pool(layers, pages, page_size, kv_heads, head_dim, torch.float32, device)

    def write(self, k: Tensor, v: Tensor, layer_kv: TorchKV, slots: Tensor) -> None:
        self._torch.write(k, v, layer_kv, slots)

    def move(self, layer_kv: TorchKV, sources: Tensor, targets: Tensor) -> None:
        self._torch.move(layer_kv, sources, targets)

    def attend(self, q: Tensor, layer_kv: TorchKV, batch: Batch, scale: float) -> Tensor:
        out = q.new_empty(q.shape)
        cu_q = batch.cu_q.tolist()
        for row, k_len in enumerate(batch.seq_lens.tolist()):
            k, v = layer_kv.context(batch.pages[row], k_len)
            begin, end = cu_q[row], cu_q[row + 1]
            for i, keys in enumerate(_keys_seen(batch.parents[begin:end].tolist(), end - begin, k_len), begin):
                out[i] = _attend_row(q[i], k[keys], v[keys], scale)
        return out

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        self._torch.rope(q, k, cos, sin)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = x.new_empty(x.shape)
        for row, into in zip(x, out, strict=True):
            into.copy_(F.rms_norm(row, row.shape, weight, eps))
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        out = x.new_empty(x.shape)
        for row, into in zip(x, out, strict=True):
            into.copy_(F.layer_norm(row, row.shape, weight, bias, eps))
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        inner = gate_up.shape[1] // 2
        out = gate_up.new_empty((gate_up.shape[0], inner))
        for row, into in zip(gate_up, out, strict=True):
            torch.mul(F.silu(row[:inner]), row[inner:], out=into)
        return out

    def pack(self, weight: Tensor, bias: Tensor | None) -> TorchLinear:
        return TorchLinear(weight.contiguous(), bias)

    def pack_blocks(self, blocks: Blocks, bias: Tensor | None) -> TorchLinear:
        """Expanded once: the values of the blocks, but the memory of float32."""
        return self.pack(blocks.expand(), bias)

    def pack_rounded(self, blocks: Blocks, bias: Tensor | None) -> TorchBlocks:
        minimum = blocks.minimum.t().float().contiguous() if blocks.bits == 4 else None
        bias = torch.zeros(blocks.q.shape[0]) if bias is None else bias
        q, scale = blocks.q.permute(1, 2, 0).float().contiguous(), blocks.scale.t().float().contiguous()
        return TorchBlocks(q, scale, minimum, bias, blocks.ins)

    def linear(self, x: Tensor, packed: TorchLinear | TorchBlocks) -> Tensor:
        if isinstance(packed, TorchBlocks):
            return _linear_rounded(x, packed)
        out = x.new_empty((x.shape[0], packed.weight.shape[0]))
        for i in range(x.shape[0]):
            # A copy of the row, because alignment may choose another code path in the library below.
            out[i] = F.linear(x[i : i + 1].clone(), packed.weight, packed.bias)[0]
        return out


def _linear_rounded(x: Tensor, packed: TorchBlocks) -> Tensor:
    """With the bits of rounded.cpp. All rows at once: sums of small whole numbers are exact in any order."""
    assert x.shape[1] == packed.ins, f"x: expected {packed.ins} inputs, got {x.shape[1]}"
    whole, scale = _round_inputs(x)
    sums = scale * whole.sum(-1, keepdim=True)
    out = packed.bias.repeat(x.shape[0], 1)
    for group, q in enumerate(packed.q):
        out += whole[group] @ q * (packed.scale[group] * scale[group])
        if packed.minimum is not None:
            out += packed.minimum[group] * sums[group]
    return out


def _round_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127 [groups, T, 32] and what to multiply them with [groups, T, 1], for x [T, ins]. An
    infinity or a NaN makes that NaN."""
    groups = F.pad(x, (0, -x.shape[1] % GROUP)).view(x.shape[0], -(-x.shape[1] // GROUP), GROUP).transpose(0, 1)
    largest = groups.abs().amax(-1, keepdim=True)
    scale = largest / 127 + (largest - largest)
    inverse = torch.where(scale >= torch.finfo(torch.float32).tiny, 1 / scale, 0.0)
    return (groups * inverse).round(), scale


def _keys_seen(parents: Sequence[int], q_len: int, k_len: int) -> Sequence[slice | list[int]]:
    """The keys of each query, in the order of their positions. No parents: a chain."""
    before = k_len - q_len
    if not parents:
        return [slice(before + i + 1) for i in range(q_len)]
    return [[*range(before), *(before + node for node in path)] for path in paths(parents)]


def _attend_row(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One query q [heads, dim] over k, v [keys, kv_heads, dim].

    Products and sums along the last dimension instead of matrix products, whose bits depend on alignment and threads.
    """
    keys, kv_heads, dim = k.shape
    grouped = (q * scale).view(kv_heads, -1, 1, dim)
    scores = (grouped * k.transpose(0, 1).unsqueeze(1)).sum(-1)  # [kv_heads, group, keys]
    weights = scores.softmax(-1).unsqueeze(2)
    across = v.permute(1, 2, 0).contiguous().view(kv_heads, 1, dim, keys)
    return (weights * across).sum(-1).view(q.shape)

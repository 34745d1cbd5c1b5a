"""The oracle backend: plain torch, any device and float type. Clear before fast; it knows no exactness
across query lengths, because scaled_dot_product_attention changes bits with them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from verdraft.kernels.base import Batch, DrafterWeights, LayerForm, LayerWeights
from verdraft.kernels.tree import paths


@dataclass(frozen=True, slots=True)
class TorchKV:
    """One layer's pages."""

    k: Tensor  # [pages, page_size, kv_heads, dim]
    v: Tensor  # [pages, page_size, kv_heads, dim]

    def context(self, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """K and V [length, kv_heads, dim] of a sequence with this block table."""
        used = pages[: -(-length // self.k.shape[1])].long()
        # Cut at the context's end before any arithmetic: whatever lies behind it may be NaN.
        return self.k[used].flatten(0, 1)[:length], self.v[used].flatten(0, 1)[:length]


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """A weight for `linear`, as it came."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]


class TorchKernels:
    """Every operation of `Kernels` in torch; the backend that the others are compared with."""

    name: str = "torch"
    page_size: int = 16
    page_sizes: tuple[int, ...] = ()
    graphs: bool = False
    exact: bool = False

    def pool(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Sequence[TorchKV]:
        shape = (pages, page_size, kv_heads, head_dim)

        def zeros() -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return [TorchKV(zeros(), zeros()) for _ in range(layers)]

    def write(self, k: Tensor, v: Tensor, layer_kv: TorchKV, slots: Tensor) -> None:
        # Attention libraries multiply by 0 what a query does not see, which leaves NaN and infinity in the sum. So the
        # pool holds finite values alone, and a key of NaN instead, for those who do see it.
        finite = v.isfinite()
        keys = k.where(finite.all(-1, keepdim=True), torch.nan)
        layer_kv.k.flatten(0, 1).index_copy_(0, slots, keys)
        layer_kv.v.flatten(0, 1).index_copy_(0, slots, v.where(finite, 0.0))

    def move(self, layer_kv: TorchKV, sources: Tensor, targets: Tensor) -> None:
        for pages in (layer_kv.k.flatten(0, 1), layer_kv.v.flatten(0, 1)):
            pages[targets] = pages[sources]

    def attend(self, q: Tensor, layer_kv: TorchKV, batch: Batch, scale: float) -> Tensor:
        out = q.new_empty(q.shape)
        cu_q = batch.cu_q.tolist()
        for row, k_len in enumerate(batch.seq_lens.tolist()):
            begin, end = cu_q[row], cu_q[row + 1]
            if begin < end:
                k, v = layer_kv.context(batch.pages[row], k_len)
                seen = visible(batch.parents[begin:end].tolist(), end - begin, k_len).to(q.device)
                out[begin:end] = attend_one(q[begin:end], k, v, scale, seen)
        return out

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        for x in (q, k):
            x1, x2 = x.float().chunk(2, dim=-1)
            c, s = cos.unsqueeze(1), sin.unsqueeze(1)
            x.copy_(torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1))

    def rope_write(
        self, q: Tensor, k: Tensor, v: Tensor, layer_kv: TorchKV, slots: Tensor, cos: Tensor, sin: Tensor
    ) -> None:
        self.rope(q, k, cos, sin)
        self.write(k, v, layer_kv, slots)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(x.add_(residual), weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> TorchLinear:
        return TorchLinear(weight, bias)

    def pack_rounded(self, weight: Tensor, bias: Tensor | None = None) -> TorchLinear:
        return self.pack(weight, bias)

    def linear(self, x: Tensor, packed: TorchLinear) -> Tensor:
        return F.linear(x, packed.weight, packed.bias)

    def fuse(self, layers: Sequence[LayerWeights], form: LayerForm) -> None:
        """Not offered."""

    def fuse_drafter(self, weights: DrafterWeights, form: LayerForm) -> None:
        """Not offered."""


def visible(parents: Sequence[int], q_len: int, k_len: int) -> Tensor:
    """Which of a sequence's keys each of its queries sees: bool [q_len, k_len]. No parents: a chain."""
    mask = torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)
    for query, path in enumerate(paths(parents)):
        mask[query, k_len - q_len :] = False
        mask[query, [k_len - q_len + i for i in path]] = True
    return mask


def attend_one(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    """One sequence: q [q, heads, dim] over k, v [k, kv_heads, dim], as far as mask [q, k] allows; returns like q."""
    # A weight of 0 does not keep NaN or infinity out of a sum: both leave it, and the rows that see one get NaN.
    finite = k.isfinite() & v.isfinite()
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.where(finite, 0.0).transpose(0, 1).unsqueeze(0),
        v.where(finite, 0.0).transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    spoilt = (mask & ~finite.flatten(1).all(1)).any(1)
    return out.squeeze(0).transpose(0, 1).masked_fill(spoilt[:, None, None], float("nan"))

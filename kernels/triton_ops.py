"""The small operations of a layer as Triton kernels, one program per row or less, so that no row sees another.

Rows [T, width] may be strided, their insides are contiguous; sums are float32 whatever the type.
"""

import triton
import triton.language as tl
from torch import Tensor

from verdraft.kernels.torch_ref import TorchKV

_INNER = 1024  # features of one program of silu_mul
_MOVED, _FEATURES = 256, 32  # slots that `move` can hold at once, for so many features each
# Without fused multiply-adds two kernels, or two instances of one, cannot round the same line differently.
_EXACT = {"enable_fp_fusion": False}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [T, width]."""
    rows, width = x.shape
    out = x.new_empty(x.shape)
    if rows:
        _rms_norm[(rows,)](x, weight, out, x.stride(0), width, eps, BLOCK=triton.next_power_of_2(width), **_EXACT)
    return out


@triton.jit
def _rms_norm(x, weight, out, stride, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / width + eps)
    normed = values * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, normed, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [T, 2 * inner] = [gate | up]; returns [T, inner]."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, inner))
    if rows:
        grid = (rows, triton.cdiv(inner, _INNER))
        _silu_mul[grid](gate_up, out, gate_up.stride(0), inner, BLOCK=_INNER, **_EXACT)
    return out


@triton.jit
def _silu_mul(gate_up, out, stride, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + inner + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * inner + at, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate q [T, heads, dim] and k [T, kv_heads, dim] in place; cos and sin are [T, dim / 2] float32."""
    tokens, half = cos.shape
    assert q.stride(2) == k.stride(2) == 1, "q, k: expected heads that are contiguous inside"
    assert cos.is_contiguous() is sin.is_contiguous() is True
    if tokens:
        grid = (tokens, q.shape[1] + k.shape[1])
        strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
        block = triton.next_power_of_2(half)
        _rope[grid](q, k, cos, sin, *strides, HEADS=q.shape[1], HALF=half, BLOCK=block, **_EXACT)


@triton.jit
def _rope(
    q, k, cos, sin, q_stride, q_head, k_stride, k_head, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: one head of one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if head < HEADS:
        _rotate(q + token * q_stride + head * q_head, cos + token * HALF, sin + token * HALF, HALF, BLOCK)
    else:
        _rotate(k + token * k_stride + (head - HEADS) * k_head, cos + token * HALF, sin + token * HALF, HALF, BLOCK)


@triton.jit
def _rotate(x, cos, sin, HALF: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    c, s = tl.load(cos + at, mask=inside), tl.load(sin + at, mask=inside)
    x1 = tl.load(x + at, mask=inside).to(tl.float32)
    x2 = tl.load(x + HALF + at, mask=inside).to(tl.float32)
    tl.store(x + at, x1 * c - x2 * s, mask=inside)
    tl.store(x + HALF + at, x2 * c + x1 * s, mask=inside)


def write(k: Tensor, v: Tensor, layer_kv: TorchKV, slots: Tensor) -> None:
    """Store k, v [T, kv_heads, dim] at `slots` [T]."""
    tokens, kv_heads, dim = k.shape
    if tokens:
        strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
        block = triton.next_power_of_2(dim)
        _write[(tokens, kv_heads)](k, v, layer_kv.k, layer_kv.v, slots, *strides, kv_heads, DIM=dim, BLOCK=block)


@triton.jit
def _write(
    k, v, k_pages, v_pages, slots, k_stride, k_head, v_stride, v_head, kv_heads, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    to = (tl.load(slots + token) * kv_heads + head) * DIM + at
    tl.store(k_pages + to, tl.load(k + token * k_stride + head * k_head + at, mask=inside), mask=inside)
    tl.store(v_pages + to, tl.load(v + token * v_stride + head * v_head + at, mask=inside), mask=inside)


def can_move(sources: Tensor) -> bool:
    """Whether so many slots fit `move`."""
    return sources.shape[0] <= _MOVED


def move(layer_kv: TorchKV, sources: Tensor, targets: Tensor) -> None:
    """Copy the slots `sources` to `targets`, [N] each, as if all were read before any is written."""
    if num := sources.shape[0]:
        width = layer_kv.k[0, 0].numel()
        grid = (triton.cdiv(width, _FEATURES),)
        count = triton.next_power_of_2(num)
        _move[grid](layer_kv.k, layer_kv.v, sources, targets, num, width, COUNT=count, BLOCK=_FEATURES)


@triton.jit(do_not_specialize=["num"])
def _move(k, v, sources, targets, num, width, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """One program: some features of all slots, so that nobody else reads what it writes."""
    row, at = tl.arange(0, COUNT), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < num)[:, None] & (at < width)[None, :]
    source = tl.load(sources + row, mask=row < num, other=0)[:, None] * width + at[None, :]
    target = tl.load(targets + row, mask=row < num, other=0)[:, None] * width + at[None, :]
    keys, values = tl.load(k + source, mask=inside), tl.load(v + source, mask=inside)
    tl.debug_barrier()
    tl.store(k + target, keys, mask=inside)
    tl.store(v + target, values, mask=inside)

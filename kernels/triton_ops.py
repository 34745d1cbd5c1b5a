"""The small operations of a layer as Triton kernels, one program per row or less, so that no row sees another.

Rows [T, width] may be strided, their insides are contiguous; sums are float32 whatever the type.
"""

import triton
import triton.language as tl
from torch import Tensor

from verdraft.kernels.torch_ref import TorchKV

_INNER = 1024  # features of one program of silu_mul
_FEW_MOVED, _MOVED, _FEATURES = 16, 256, 32  # slots that `move` can hold at once, for so many features each
# Without fused multiply-adds two kernels, or two instances of one, cannot round the same line differently.
_EXACT = {"enable_fp_fusion": False}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [T, width]."""
    return _normed(x, x, weight, eps, add=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `residual` to x [T, width] in place; returns RMSNorm of the sum."""
    return _normed(x, residual, weight, eps, add=True)


def _normed(x: Tensor, residual: Tensor, weight: Tensor, eps: float, add: bool) -> Tensor:
    rows, width = x.shape
    out = x.new_empty(x.shape)
    if rows:
        strides, block = (x.stride(0), residual.stride(0)), triton.next_power_of_2(width)
        _rms_norm[(rows,)](x, residual, weight, out, *strides, width, eps, BLOCK=block, ADD=add, **_EXACT)
    return out


@triton.jit
def _rms_norm(x, residual, weight, out, stride, residual_stride, width, eps, BLOCK: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * residual_stride + at, mask=inside, other=0.0).to(tl.float32)
        values = values.to(x.dtype.element_ty).to(tl.float32)  # the norm sees what the stream keeps
        tl.store(x + row * stride + at, values, mask=inside)
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
    _turn(q, k, k, k, k, k, cos, sin, store=False)


def rope_write(q: Tensor, k: Tensor, v: Tensor, layer_kv: TorchKV, slots: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate q in place, and put k rotated and v at `slots` [T] as `write` does; k stays as it is."""
    _turn(q, k, v, layer_kv.k, layer_kv.v, slots, cos, sin, store=True)


def _turn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    store: bool,
) -> None:
    tokens, half = cos.shape
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1, "q, k, v: expected heads that are contiguous inside"
    assert cos.is_contiguous() is sin.is_contiguous() is True
    if tokens:
        heads, kv_heads = q.shape[1], k.shape[1]
        strides = (x.stride(i) for x in (q, k, v) for i in (0, 1))
        sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "HALF": half, "BLOCK": triton.next_power_of_2(half)}
        _rope[(tokens, heads + kv_heads)](
            q, k, v, k_pages, v_pages, slots, cos, sin, *strides, **sizes, STORE=store, **_EXACT
        )


@triton.jit
def _rope(
    q, k, v, k_pages, v_pages, slots, cos, sin, q_stride, q_head, k_stride, k_head, v_stride, v_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """One program: one head of one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += token * HALF
    sin += token * HALF
    if head < HEADS:
        at = q + token * q_stride + head * q_head
        _rotate(at, at, cos, sin, False, HALF, BLOCK)
    else:
        head -= HEADS
        at = k + token * k_stride + head * k_head
        if STORE:
            to = (tl.load(slots + token) * KV_HEADS + head) * 2 * HALF
            bad = _keep_value(v + token * v_stride + head * v_head, v_pages + to, 2 * HALF, 2 * BLOCK)
            _rotate(at, k_pages + to, cos, sin, bad, HALF, BLOCK)
        else:
            _rotate(at, at, cos, sin, False, HALF, BLOCK)


@triton.jit
def _rotate(x, to, cos, sin, bad, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """NaN if it is `bad`."""
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    c, s = tl.load(cos + at, mask=inside), tl.load(sin + at, mask=inside)
    x1 = tl.load(x + at, mask=inside).to(tl.float32)
    x2 = tl.load(x + HALF + at, mask=inside).to(tl.float32)
    tl.store(to + at, tl.where(bad, float("nan"), x1 * c - x2 * s), mask=inside)
    tl.store(to + HALF + at, tl.where(bad, float("nan"), x2 * c + x1 * s), mask=inside)


@triton.jit
def _keep_value(v, to, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a head's value as TorchKernels.write does; whether its key is to be NaN."""
    at = tl.arange(0, BLOCK)
    value = tl.load(v + at, mask=at < SIZE, other=0.0)
    finite = tl.abs(value.to(tl.float32)) < float("inf")
    tl.store(to + at, tl.where(finite, value, 0.0), mask=at < SIZE)
    return tl.min(finite.to(tl.int32)) == 0


def write(k: Tensor, v: Tensor, layer_kv: TorchKV, slots: Tensor) -> None:
    """As Kernels.write: k, v [T, kv_heads, dim] at `slots` [T]."""
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
    to = (tl.load(slots + token) * kv_heads + head) * DIM
    bad = _keep_value(v + token * v_stride + head * v_head, v_pages + to, DIM, BLOCK)
    at = tl.arange(0, BLOCK)
    key = tl.load(k + token * k_stride + head * k_head + at, mask=at < DIM)
    tl.store(k_pages + to + at, tl.where(bad, float("nan"), key), mask=at < DIM)


def can_move(sources: Tensor) -> bool:
    """Whether so many slots fit `move`."""
    return sources.shape[0] <= _MOVED


def move(layer_kv: TorchKV, sources: Tensor, targets: Tensor) -> None:
    """Copy the slots `sources` to `targets`, [N] each, as if all were read before any is written."""
    if num := sources.shape[0]:
        width = layer_kv.k[0, 0].numel()
        grid = (triton.cdiv(width, _FEATURES),)
        count = _FEW_MOVED if num <= _FEW_MOVED else _MOVED  # two sizes: to compile takes a second
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

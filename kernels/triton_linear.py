"""A matrix product whose rows never depend on their number: one tile shape for all, and no split of the sum.

Libraries choose among many kernels by the number of rows, and two of them may round a row differently; this one is for
the deterministic mode, and for weights in 8 bits. Knows no layer.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from verdraft.kernels.blocks import GROUP, Blocks
from verdraft.kernels.float8 import Float8Rows

_ROWS, _OUTS = 64, 64
_INS, _WIDE_INS = 128, 32  # inputs of a step of the sum, for types of 2 and of 4 bytes
_SWIZZLE = 8  # row blocks that share an output block's weights before the next is read


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, ins] times weight [outs, ins], plus bias [outs]: [T, outs] in the type of x, summed in float32."""
    assert weight.is_contiguous()
    return _launch(x, weight, None, bias)


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight in 8 bits: scale * q, a scale for every GROUP inputs of an output (kernels/blocks.py), or for all."""

    q: Tensor  # [outs, ins] int8 or float8_e4m3fn
    scale: Tensor  # [outs, groups] float16, or [outs] float32
    bias: Tensor | None  # [outs]


def pack_blocks(blocks: Blocks, bias: Tensor | None) -> ScaledWeight:
    """Blocks of 8 bits as `scaled_linear` reads them."""
    assert blocks.bits == 8
    return ScaledWeight(blocks.q.flatten(1)[:, : blocks.ins].contiguous(), blocks.scale.contiguous(), bias)


def pack_float8(rows: Float8Rows, bias: Tensor | None) -> ScaledWeight:
    """Floats of 8 bits as `scaled_linear` reads them."""
    return ScaledWeight(rows.q, rows.scale, bias)


def scaled_linear(x: Tensor, weight: ScaledWeight) -> Tensor:
    """As `linear`, reading half the bytes: the weights become what x is on their way to the product."""
    return _launch(x, weight.q, weight.scale, weight.bias)


def _launch(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    (rows, ins), outs, scale_dims = x.shape, weight.shape[0], 0 if scale is None else scale.dim()
    assert x.stride(1) == 1, "x: expected rows that are contiguous inside"
    out = x.new_empty((rows, outs))
    if rows:
        _linear[(triton.cdiv(rows, _ROWS) * triton.cdiv(outs, _OUTS),)](
            x,
            weight,
            weight if scale is None else scale,
            weight if bias is None else bias,
            out,
            rows,
            ins,
            outs,
            x.stride(0),
            GROUP=GROUP if scale_dims == 2 else 0,
            WHOLE=scale_dims == 1,
            BIAS=bias is not None,
            BLOCK_M=_ROWS,
            BLOCK_N=_OUTS,
            BLOCK_K=_INS if x.dtype.itemsize == 2 else _WIDE_INS,
            SWIZZLE=_SWIZZLE,
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize=["rows"])  # one compiled kernel for every number of them
def _linear(
    x, weight, scale, bias, out, rows, ins, outs, stride, GROUP: tl.constexpr, WHOLE: tl.constexpr,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWIZZLE: tl.constexpr,
):  # fmt: skip
    row_block, out_block = _place(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(outs, BLOCK_N), SWIZZLE)
    row, col = row_block * BLOCK_M + tl.arange(0, BLOCK_M), out_block * BLOCK_N + tl.arange(0, BLOCK_N)
    real_row, real_col = row < rows, col < outs
    at_x, at_weight = row.to(tl.int64) * stride, col.to(tl.int64) * ins
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, ins, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        some = tl.load(x + at_x[:, None] + k[None, :], mask=real_row[:, None] & (k < ins)[None, :], other=0.0)
        wanted = real_col[None, :] & (k < ins)[:, None]
        part = tl.load(weight + at_weight[None, :] + k[:, None], mask=wanted, other=0.0)
        if GROUP or WHOLE:
            part = part.to(tl.float32)  # on the way to bfloat16, quicker than at once
        if GROUP:
            groups = tl.cdiv(ins, GROUP)
            scales = tl.load(scale + (col * groups)[None, :] + (k // GROUP)[:, None], mask=wanted, other=0.0)
            part *= scales.to(tl.float32)
        acc = tl.dot(some, part.to(x.dtype.element_ty), acc, input_precision="ieee")
    if WHOLE:
        acc *= tl.load(scale + col, mask=real_col, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias + col, mask=real_col, other=0.0).to(tl.float32)[None, :]
    to = row.to(tl.int64)[:, None] * outs + col[None, :]
    tl.store(out + to, acc, mask=real_row[:, None] & real_col[None, :])


@triton.jit
def _place(program, row_blocks, out_blocks, SWIZZLE: tl.constexpr):
    """The row and output block of a program: SWIZZLE row blocks by all output blocks, then the next SWIZZLE."""
    first = program // (SWIZZLE * out_blocks) * SWIZZLE
    high = tl.minimum(row_blocks - first, SWIZZLE)
    inside = program % (SWIZZLE * out_blocks)
    return first + inside % high, inside // high

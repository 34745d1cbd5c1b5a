"""Products with inputs that are rounded to 8 bits: integers meet integers, every row has the bits that it has alone,
and they are the same on every processor and without a compiler."""

import random
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from verdraft.kernels.base import Kernels, KernelUnavailable
from verdraft.kernels.blocks import Bits, Quantization, quantize
from verdraft.kernels.chooser import choose_kernels
from verdraft.kernels.cpu import CpuKernels
from verdraft.kernels.native import NativeOps
from verdraft.kernels.packed import NativeBlocks
from verdraft.kernels.portable import PortableOps

SHAPES = [(576, 960), (1728, 64), (1, 1), (7, 13), (32, 32), (33, 65), (100, 1), (5, 200), (1025, 31)]
MAX_ROWS = 130
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=get_args(Bits))
def bits(request: pytest.FixtureRequest) -> Bits:
    value: Bits = request.param
    return value


def make_layer(ins: int, outs: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(outs, ins, generator=random) / ins**0.5
    return weight, torch.randn(outs, generator=random), torch.randn(MAX_ROWS, ins, generator=random)


def to_bytes(x: Tensor) -> Tensor:
    """Every 32 inputs of a row as whole numbers from -127 to 127 times one scale, as double."""
    groups = F.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    whole = (groups.double() * torch.where(scale > 0, 1 / scale, 0.0)).round()
    return (whole * scale).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize(("ins", "outs"), SHAPES)
def test_every_number_of_rows_gives_the_bits_of_a_lone_row(native: NativeOps, bits: Bits, ins: int, outs: int) -> None:
    """In any order, on one thread and on two in turns."""
    weight, bias, x = make_layer(ins, outs)
    packed, shuffle = native.pack_rounded(quantize(weight, bits), bias), random.Random(0)
    alone = torch.cat([native.linear(row, packed) for row in x.split(1)])
    for rows in range(1, (MAX_ROWS if ins * outs < 100_000 else 40) + 1):
        order = torch.tensor(shuffle.sample(range(MAX_ROWS), rows))
        torch.set_num_threads(1 + rows % 2)
        assert torch.equal(native.linear(x[order], packed), alone[order]), rows


@pytest.mark.parametrize(("ins", "outs"), SHAPES)
def test_weights_and_inputs_are_rounded_to_bytes_and_nothing_else(
    native: NativeOps, bits: Bits, ins: int, outs: int
) -> None:
    weight, bias, x = make_layer(ins, outs)
    x[1], x[2, 0], x[3] = 0.0, 1e3, x[3] * 1e-30
    blocks = quantize(weight, bits)
    expected = to_bytes(x) @ blocks.expand().double().T
    for offset in (None, bias):
        found = native.linear(x, native.pack_rounded(blocks, offset)).double()
        torch.testing.assert_close(found, expected + (0 if offset is None else offset), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("ins", "outs"), SHAPES)
def test_every_processor_and_plain_torch_find_the_same_bits(native: NativeOps, bits: Bits, ins: int, outs: int) -> None:
    weight, bias, x = make_layer(ins, outs)
    x[1], x[2, 0], x[3], x[4], x[5] = 0.0, 1e4, x[3] * 1e-30, x[4] * 1e-38, x[5] * 1e30
    x[6, : ins // 2], x[7] = 0.0, (x[7] * 4).round() / 8  # halves between two whole numbers
    blocks, portable = quantize(weight, bits), PortableOps()
    for offset in (None, bias):
        expected = portable.linear(x, portable.pack_rounded(blocks, offset))
        assert torch.equal(native.linear(x, native.pack_rounded(blocks, offset)), expected)


def test_largest_bytes_overflow_nothing(native: NativeOps, bits: Bits) -> None:
    weight, x = torch.ones(3, 64), torch.tensor([[1.0], [-1.0]]).expand(2, 64).contiguous()
    weight[1], weight[2, ::2] = -1.0, -1.0
    blocks = quantize(weight, bits)
    found = native.linear(x, native.pack_rounded(blocks, None))
    torch.testing.assert_close(found, x @ blocks.expand().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ops", ["native", "portable"])
@pytest.mark.parametrize("value", [NAN, -NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 40, 99])
def test_what_is_not_finite_makes_its_row_nan_and_no_other(
    native: NativeOps, bits: Bits, ops: str, value: float, place: int
) -> None:
    weight, bias, x = make_layer(100, 70)
    chosen = native if ops == "native" else PortableOps()
    packed = chosen.pack_rounded(quantize(weight, bits), bias)
    expected = chosen.linear(x, packed)
    x[3, place] = value
    expected[3] = NAN
    torch.testing.assert_close(chosen.linear(x, packed), expected, rtol=0.0, atol=0.0, equal_nan=True)


def test_strided_rows_and_no_rows(native: NativeOps, bits: Bits) -> None:
    weight, bias, x = make_layer(100, 70)
    packed = native.pack_rounded(quantize(weight, bits), bias)
    wide = torch.randn(MAX_ROWS, 300)
    wide[:, 50:150] = x
    assert torch.equal(native.linear(wide[:, 50:150], packed), native.linear(x, packed))
    assert native.linear(x[:0], packed).shape == (0, 70)
    portable = PortableOps()
    assert portable.linear(x[:0], portable.pack_rounded(quantize(weight, bits), bias)).shape == (0, 70)


def test_every_backend_comes_close(kernels: Kernels) -> None:
    weight, bias, x = make_layer(96, 70)
    found = kernels.linear(x, kernels.pack_rounded(weight, bias))
    torch.testing.assert_close(found, x @ weight.T + bias, rtol=0.0, atol=0.1)


def test_weights_that_a_half_cannot_hold_are_refused(native: NativeOps) -> None:
    with pytest.raises(KernelUnavailable, match="65504"):
        CpuKernels(native).pack_rounded(torch.full((3, 40), 1e38))


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int4", 4)])
def test_with_int8_activations_the_model_s_own_weights_meet_rounded_inputs(
    quantization: Quantization, bits: Bits
) -> None:
    weight, bias, x = make_layer(96, 70)
    chosen = choose_kernels("cpu", torch.device("cpu"), torch.float32, quantization, activations="int8")
    packed = chosen.pack(weight, bias)
    assert isinstance(packed, NativeBlocks)
    assert (packed.bits, packed.rounds) == (bits, True)
    portable = CpuKernels(PortableOps(), quantization, "int8")
    assert torch.equal(chosen.linear(x, packed), portable.linear(x, portable.pack(weight, bias)))


@pytest.mark.parametrize("quantization", ["none", "auto"])
def test_int8_activations_need_blocks(quantization: Quantization) -> None:
    chosen = choose_kernels("cpu", torch.device("cpu"), torch.float32, quantization, activations="int8")
    with pytest.raises(KernelUnavailable, match=rf"activations: int8 .* quantization: {quantization} "):
        chosen.pack(make_layer(96, 70)[0])


@pytest.mark.parametrize(("name", "dtype"), [("torch", torch.float32), ("triton", torch.float32), ("auto", torch.half)])
def test_int8_activations_need_the_cpu_kernels(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(KernelUnavailable, match="int8 activations"):
        choose_kernels(name, torch.device("cpu"), dtype, "int8", activations="int8")

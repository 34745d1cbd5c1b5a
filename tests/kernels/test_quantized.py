"""Weights in 4 and 8 bits: the blocks say what the weights are, and the products have the bits of those weights."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from verdraft.kernels.base import KernelUnavailable
from verdraft.kernels.blocks import Bits, Quantization, choose_blocks, quantize
from verdraft.kernels.chooser import choose_kernels
from verdraft.kernels.cpu import CpuKernels
from verdraft.kernels.native import NativeOps
from verdraft.kernels.packed import FEW_ROWS, NativeBlocks, TwoPacks
from verdraft.kernels.portable import PortableOps

CPU = torch.device("cpu")
SHAPES = [(576, 960), (1536, 576), (1, 1), (7, 13), (32, 32), (33, 65), (100, 1), (1025, 31), (3000, 17), (5, 200)]
MAX_ROWS = 130
BITS: list[Bits] = [4, 8]


@pytest.fixture(params=BITS)
def bits(request: pytest.FixtureRequest) -> Bits:
    value: Bits = request.param
    return value


def make_layer(ins: int, outs: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(outs, ins, generator=random) / ins**0.5
    return weight, torch.randn(outs, generator=random), torch.randn(MAX_ROWS, ins, generator=random)


def q4_1(outs: int, ins: int) -> Tensor:
    """A weight as GGUF's Q4_1 holds it: halves for scale and minimum, the steps 0 and 15 in every group."""
    random = torch.Generator().manual_seed(1)
    scale, minimum = (torch.randn(2, outs, ins // 32, 1, generator=random) * 0.01).half().float()
    q = torch.randint(0, 16, (outs, ins // 32, 32), generator=random)
    q[..., 3], q[..., 17] = 0, 15
    return (scale.abs() * q + minimum).flatten(1)


def q8_0(outs: int, ins: int) -> Tensor:
    """A weight as GGUF's Q8_0 holds it: -127 or 127 in every group."""
    random = torch.Generator().manual_seed(1)
    scale = (torch.rand(outs, ins // 32, 1, generator=random) * 0.01).half().float()
    q = torch.randint(-127, 128, (outs, ins // 32, 32), generator=random)
    q[..., 5] = torch.where(q[..., 6] > 0, 127, -127)
    return (scale * q).flatten(1)


@pytest.mark.parametrize(("ins", "outs"), SHAPES)
def test_every_number_of_rows_gives_the_bits_of_a_lone_row(native: NativeOps, bits: Bits, ins: int, outs: int) -> None:
    """On one thread and on two in turns."""
    weight, bias, x = make_layer(ins, outs)
    packed = native.pack_blocks(quantize(weight, bits), bias)
    alone = torch.cat([native.linear(row, packed) for row in x.split(1)])
    for rows in range(1, (MAX_ROWS if ins * outs < 10_000 else 40) + 1):
        torch.set_num_threads(1 + rows % 2)
        assert torch.equal(native.linear(x[:rows], packed), alone[:rows]), rows
        torch.set_num_threads(2 - rows % 2)
        assert torch.equal(native.linear(x[-rows:], packed), alone[-rows:]), rows


@pytest.mark.parametrize(("ins", "outs"), SHAPES)
def test_a_product_has_the_bits_of_the_expanded_weight(native: NativeOps, bits: Bits, ins: int, outs: int) -> None:
    weight, bias, x = make_layer(ins, outs)
    blocks = quantize(weight, bits)
    expanded = blocks.expand()
    for offset in (None, bias):
        found = native.linear(x, native.pack_blocks(blocks, offset))
        assert torch.equal(found, native.linear(x, native.pack(expanded, offset)))
        exact = x.double() @ expanded.double().T + (0 if offset is None else offset)
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)


def test_blocks_are_close_to_the_weight(bits: Bits) -> None:
    """Half a step of 15, or of 254 over both signs, and the rounding of the scale to a half."""
    weight, _, _ = make_layer(576, 960)
    groups = weight.view(960, -1, 32)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step = (high - low) / 15 if bits == 4 else torch.maximum(high, -low) / 127
    error = (quantize(weight, bits).expand().view_as(groups) - groups).abs()
    assert (error <= step * 0.52 + 1e-3 * groups.abs()).all()


def test_strided_rows_and_no_rows(native: NativeOps, bits: Bits) -> None:
    weight, bias, x = make_layer(100, 70)
    packed = native.pack_blocks(quantize(weight, bits), bias)
    wide = torch.randn(MAX_ROWS, 300)
    wide[:, 50:150] = x
    assert torch.equal(native.linear(wide[:, 50:150], packed), native.linear(x, packed))
    assert native.linear(x[:0], packed).shape == (0, 70)


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
def test_weights_from_blocks_are_found_again_exactly(quantization: Quantization) -> None:
    for weight, bits in ((q4_1(70, 96), 4), (q8_0(70, 96), 8)):
        blocks = choose_blocks(weight, quantization)
        assert blocks is not None
        assert blocks.bits == bits
        assert torch.equal(blocks.expand(), weight)


def test_other_weights_get_the_bits_that_were_asked_for() -> None:
    weight, _, _ = make_layer(96, 70)
    assert choose_blocks(weight, "none") is choose_blocks(weight, "auto") is None
    for quantization, bits in (("int8", 8), ("int4", 4)):
        blocks = choose_blocks(weight, quantization)  # type: ignore[arg-type]
        assert blocks is not None
        assert blocks.bits == bits


def test_a_weight_that_is_exact_but_for_its_last_row_stays_as_it_is() -> None:
    weight = q4_1(5000, 32)
    weight[-1, 0] += 1e-3
    assert choose_blocks(weight, "auto") is None


@pytest.mark.parametrize("weight", [torch.zeros(3, 40), torch.full((3, 40), 0.5), torch.full((3, 40), -1e-7)])
def test_constant_groups(weight: Tensor, bits: Bits) -> None:
    torch.testing.assert_close(quantize(weight, bits).expand(), weight, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e38])
def test_weights_that_a_half_cannot_hold_are_refused(value: float, bits: Bits) -> None:
    weight = torch.zeros(3, 40)
    weight[1, 2] = value
    with pytest.raises(KernelUnavailable, match="65504"):
        quantize(weight, bits)
    assert choose_blocks(weight, "auto") is None


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
def test_without_a_compiler_the_values_are_the_same(quantization: Quantization) -> None:
    weight, bias, x = make_layer(100, 70)
    kernels = CpuKernels(PortableOps(), quantization)
    packed = kernels.pack(weight, bias)
    blocks = choose_blocks(weight, quantization)
    expanded = weight if blocks is None else blocks.expand()
    found = kernels.linear(x, packed)
    torch.testing.assert_close(found, x @ expanded.T + bias, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[3:5], kernels.linear(x[3:5], packed))


def test_the_backend_packs_as_it_was_chosen() -> None:
    weight = q4_1(64, 64)
    assert isinstance(choose_kernels("cpu", CPU, torch.float32, "auto").pack(weight), TwoPacks)
    assert isinstance(choose_kernels("cpu", CPU, torch.float32, "int4").pack(weight), NativeBlocks)
    assert not isinstance(choose_kernels("cpu", CPU, torch.float32).pack(weight), NativeBlocks)


@pytest.mark.parametrize("make", [q4_1, q8_0])
def test_exact_blocks_and_panels_have_the_same_bits_for_any_number_of_rows(
    native: NativeOps, make: Callable[[int, int], Tensor]
) -> None:
    weight, bias, x = make(70, 1536), torch.randn(70), torch.randn(2 * FEW_ROWS, 1536)
    plain, mixed = CpuKernels(native), CpuKernels(native, "auto")
    panels, both = plain.pack(weight, bias), mixed.pack(weight, bias)
    for rows in range(2 * FEW_ROWS + 1):
        assert torch.equal(mixed.linear(x[:rows], both), plain.linear(x[:rows], panels)), rows


@pytest.mark.parametrize(("name", "dtype"), [("torch", torch.float32), ("auto", torch.bfloat16)])
def test_a_backend_that_cannot_quantise_says_so(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(KernelUnavailable, match="int8 needs the cpu kernels"):
        choose_kernels(name, CPU, dtype, "int8")
    with pytest.raises(KernelUnavailable, match="fp8 needs the triton kernels"):
        choose_kernels(name, CPU, dtype, "fp8")
    assert choose_kernels(name, CPU, dtype, "auto").name == "torch"


def test_the_cpu_kernels_refuse_float8() -> None:
    with pytest.raises(KernelUnavailable, match=r"cpu cannot run float32 on cpu \(fp8\): has no product"):
        choose_kernels("cpu", CPU, torch.float32, "fp8")

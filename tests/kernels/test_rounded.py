"""Drafters' weights: integers meet integers, and every row has the bits that it has alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from verdraft.kernels.base import Kernels, KernelUnavailable
from verdraft.kernels.blocks import quantize
from verdraft.kernels.cpu import CpuKernels
from verdraft.kernels.native import NativeOps

SHAPES = [(576, 960), (1728, 64), (1, 1), (7, 13), (32, 32), (33, 65), (100, 1), (5, 200)]
MAX_ROWS = 40


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
def test_every_number_of_rows_gives_the_bits_of_a_lone_row(native: NativeOps, ins: int, outs: int) -> None:
    """On one thread and on two in turns."""
    kernels = CpuKernels(native)
    weight, bias, x = make_layer(ins, outs)
    packed = kernels.pack_rounded(weight, bias)
    alone = torch.cat([kernels.linear(row, packed) for row in x.split(1)])
    for rows in range(1, MAX_ROWS + 1):
        torch.set_num_threads(1 + rows % 2)
        assert torch.equal(kernels.linear(x[:rows], packed), alone[:rows]), rows
        torch.set_num_threads(2 - rows % 2)
        assert torch.equal(kernels.linear(x[-rows:], packed), alone[-rows:]), rows


@pytest.mark.parametrize(("ins", "outs"), SHAPES)
def test_weights_and_inputs_are_rounded_to_bytes_and_nothing_else(native: NativeOps, ins: int, outs: int) -> None:
    kernels = CpuKernels(native)
    weight, bias, x = make_layer(ins, outs)
    x[1], x[2, 0], x[3] = 0.0, 1e4, x[3] * 1e-30
    expected = to_bytes(x) @ quantize(weight, 8).expand().double().T
    for offset in (None, bias):
        found = kernels.linear(x, kernels.pack_rounded(weight, offset)).double()
        torch.testing.assert_close(found, expected + (0 if offset is None else offset), rtol=1e-5, atol=1e-5)


def test_largest_bytes_overflow_nothing(native: NativeOps) -> None:
    weight, x = torch.ones(3, 64), torch.tensor([[1.0], [-1.0]]).expand(2, 64).contiguous()
    weight[1] = -1.0
    found = CpuKernels(native).linear(x, CpuKernels(native).pack_rounded(weight))
    torch.testing.assert_close(found, x @ weight.T, rtol=1e-3, atol=0.0)


def test_strided_rows_and_no_rows(native: NativeOps) -> None:
    kernels = CpuKernels(native)
    weight, bias, x = make_layer(100, 70)
    packed = kernels.pack_rounded(weight, bias)
    wide = torch.randn(MAX_ROWS, 300)
    wide[:, 50:150] = x
    assert torch.equal(kernels.linear(wide[:, 50:150], packed), kernels.linear(x, packed))
    assert kernels.linear(x[:0], packed).shape == (0, 70)


def test_every_backend_comes_close(kernels: Kernels) -> None:
    weight, bias, x = make_layer(96, 70)
    found = kernels.linear(x, kernels.pack_rounded(weight, bias))
    torch.testing.assert_close(found, x @ weight.T + bias, rtol=0.0, atol=0.1)


def test_weights_that_a_half_cannot_hold_are_refused(native: NativeOps) -> None:
    with pytest.raises(KernelUnavailable, match="65504"):
        CpuKernels(native).pack_rounded(torch.full((3, 40), 1e38))

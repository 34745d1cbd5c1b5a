"""Weights as floats of 8 bits with a scale for each output."""

import pytest
import torch

from verdraft.kernels.base import KernelUnavailable
from verdraft.kernels.float8 import round_to_float8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_keeps_four_bits_unless_its_output_has_far_larger_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(5000, 70) * torch.randn(5000, 1).mul(20).exp()).clamp(-1e37, 1e37).to(dtype)
    rows = round_to_float8(weight)
    sizes, error = weight.double().abs(), (rows.expand().double() - weight.double()).abs()
    largest = sizes.amax(1, keepdim=True)
    assert (error <= torch.maximum(sizes / 16, largest / 448 / 2**10) * (1 + 1e-6)).all()
    assert (error <= 1e-6 * sizes)[sizes == largest].all()


def test_what_floats_of_8_bits_hold_comes_back() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    weight = torch.stack([every.nan_to_num(0.0) * scale for scale in (1.0, 2.0**-20, 2.0**60)])
    assert torch.equal(round_to_float8(weight).expand(), weight)


def test_an_output_without_weights_stays_without() -> None:
    assert torch.equal(round_to_float8(torch.zeros(2, 3)).expand(), torch.zeros(2, 3))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_weight_that_is_no_number_is_refused(value: float) -> None:
    weight = torch.ones(3, 4)
    weight[1, 2] = value
    with pytest.raises(KernelUnavailable, match="fp8 cannot hold"):
        round_to_float8(weight)

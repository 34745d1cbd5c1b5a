"""Linear layers: close to float64 everywhere, and on the CPU backend every row has the bits that it has alone."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from verdraft.kernels.base import Kernels
from verdraft.kernels.cpu import CpuKernels
from verdraft.kernels.native import NativeOps
from verdraft.kernels.torch_ref import TorchKernels

MODEL_SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576)]  # SmolLM2-135M, in x out
ODD_SHAPES = [(1, 1), (7, 13), (33, 65), (100, 1), (1024, 40), (1025, 31), (3000, 17), (5, 200)]
MAX_ROWS = 130


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make_layer(inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=random) / inputs**0.5
    return weight, torch.randn(outputs, generator=random), torch.randn(MAX_ROWS, inputs, generator=random)


@pytest.mark.parametrize(("inputs", "outputs"), [*MODEL_SHAPES, *ODD_SHAPES])
def test_every_number_of_rows_gives_the_bits_of_a_lone_row(native: NativeOps, inputs: int, outputs: int) -> None:
    exact = CpuKernels(native)
    weight, bias, x = make_layer(inputs, outputs)
    packed = exact.pack(weight, bias)
    alone = torch.cat([exact.linear(row, packed) for row in x.split(1)])
    for rows in range(1, MAX_ROWS + 1):
        assert torch.equal(exact.linear(x[:rows], packed), alone[:rows]), rows


def test_a_large_head_gives_the_bits_of_a_lone_row(exact: Kernels) -> None:
    weight, _, x = make_layer(576, 49152)
    packed = exact.pack(weight)
    alone = torch.cat([exact.linear(row, packed) for row in x[:4].split(1)])
    for rows in (1, 2, 4, 13, 40):
        assert torch.equal(exact.linear(x[:rows], packed)[:4], alone[:rows]), rows


@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (1536, 576), (33, 65)])
def test_threads_and_order_of_rows_change_nothing(exact: Kernels, inputs: int, outputs: int) -> None:
    weight, bias, x = make_layer(inputs, outputs)
    packed = exact.pack(weight, bias)
    order = torch.randperm(MAX_ROWS, generator=torch.Generator().manual_seed(2))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = exact.linear(x, packed)
        torch.set_num_threads(2)
        two = exact.linear(x[order], packed)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(two, one[order])


@pytest.mark.parametrize(("inputs", "outputs"), [*MODEL_SHAPES, *ODD_SHAPES])
def test_products_agree_with_float64(exact: Kernels, inputs: int, outputs: int) -> None:
    weight, bias, x = make_layer(inputs, outputs)
    for b in (None, bias):
        expected = F.linear(x[:27].double(), weight.double(), None if b is None else b.double())
        out = exact.linear(x[:27], exact.pack(weight, b))
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_an_output_is_one_chain_from_the_bias_over_the_inputs() -> None:
    """Tiles, threads and vectors cannot matter where the order of additions is fixed: float64 retraces it exactly."""
    weight, bias, x = make_layer(50, 37)
    chain = bias.double().expand(MAX_ROWS, 37)
    for k in range(50):
        # A product of two floats is exact in double; its sum with a float rounds twice, which is hardly ever seen.
        chain = (chain + x[:, k : k + 1].double() * weight[:, k].double()).float().double()
    exact = CpuKernels()
    same = exact.linear(x, exact.pack(weight, bias)).double() == chain
    assert same.float().mean() > 0.999


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (33, 65)])
def test_what_is_not_finite_stays_in_its_row(exact: Kernels, poison: float, inputs: int, outputs: int) -> None:
    weight, bias, x = make_layer(inputs, outputs)
    packed = exact.pack(weight, bias)
    clean = exact.linear(x, packed)
    for row in (0, 5, MAX_ROWS - 1):
        poisoned = x.clone()
        poisoned[row, inputs // 2] = poison
        out = exact.linear(poisoned, packed)
        assert not out[row].isfinite().any()
        others = torch.arange(MAX_ROWS) != row
        assert torch.equal(out[others], clean[others])


def test_nothing_is_written_beside_the_result(native: NativeOps) -> None:
    """Whole vectors go out only where the row is that long: a last panel of any width leaves the next row alone."""
    exact = CpuKernels(native)
    for outputs in range(1, 70):
        weight, bias, x = make_layer(9, outputs)
        expected = F.linear(x[:13].double(), weight.double(), bias.double())
        out = exact.linear(x[:13], exact.pack(weight, bias))
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_no_rows_and_strided_rows(exact: Kernels, threads: int) -> None:
    weight, bias, x = make_layer(64, 24)
    packed = exact.pack(weight, bias)
    assert exact.linear(x[:0], packed).shape == (0, 24)
    wide = torch.cat((x, x), dim=1)
    assert torch.equal(exact.linear(wide[:, 64:], packed), exact.linear(x, packed))


def test_views_pack_like_their_copies(exact: Kernels) -> None:
    weight, bias, x = make_layer(64, 24)
    expected = exact.linear(x, exact.pack(weight, bias))
    views = exact.pack(weight.t().contiguous().t(), torch.stack((bias, bias), 1)[:, 0])
    assert torch.equal(exact.linear(x, views), expected)


def test_a_packed_weight_needs_its_source_no_more() -> None:
    weight, _, x = make_layer(64, 40)
    packed = CpuKernels().pack(weight)
    before = CpuKernels().linear(x, packed)
    weight.zero_()
    assert torch.equal(CpuKernels().linear(x, packed), before)


def test_torch_backend_is_f_linear() -> None:
    weight, bias, x = make_layer(33, 65)
    exact = TorchKernels()
    assert torch.equal(exact.linear(x, exact.pack(weight, bias)), F.linear(x, weight, bias))

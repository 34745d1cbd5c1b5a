"""Linear layers: close to F.linear everywhere, and bit-identical rows on the CPU backend."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from verdraft.kernels.cpu import CpuKernels, CpuLinear
from verdraft.kernels.portable import PortableOps
from verdraft.kernels.torch_ref import TorchKernels

MODEL_SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576)]  # SmolLM2-135M, in x out
ODD_SHAPES = [(1, 1), (7, 13), (33, 65), (100, 1), (1024, 40), (1025, 40), (3000, 17)]
EDGE_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130)


@pytest.fixture
def kernels() -> CpuKernels:
    return CpuKernels(PortableOps())  # the product is oneDNN's with any operations


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make_layer(inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=random) / inputs**0.5
    return weight, torch.randn(outputs, generator=random), torch.randn(130, inputs, generator=random)


def one_by_one(kernels: CpuKernels, x: Tensor, packed: CpuLinear) -> Tensor:
    return torch.cat([kernels.linear(row, packed) for row in x.split(1)])


@pytest.mark.parametrize(("inputs", "outputs"), MODEL_SHAPES)
def test_every_number_of_rows_gives_the_bits_of_a_lone_row(kernels: CpuKernels, inputs: int, outputs: int) -> None:
    weight, _, x = make_layer(inputs, outputs)
    packed = kernels.pack(weight)
    assert packed.prepacked
    alone = one_by_one(kernels, x, packed)
    for rows in range(1, 131):
        assert torch.equal(kernels.linear(x[:rows], packed), alone[:rows]), rows


@pytest.mark.parametrize(("inputs", "outputs"), [*ODD_SHAPES, (576, 49152)])
def test_odd_shapes_and_bias_give_the_bits_of_a_lone_row(kernels: CpuKernels, inputs: int, outputs: int) -> None:
    weight, bias, x = make_layer(inputs, outputs)
    packed = kernels.pack(weight, bias)
    alone = one_by_one(kernels, x[:33], packed)
    for rows in EDGE_ROWS:
        assert torch.equal(kernels.linear(x[:rows], packed)[:33], alone[:rows]), rows


@pytest.mark.parametrize("prepack", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (1536, 576), (33, 65)])
def test_threads_and_order_of_rows_change_nothing(prepack: bool, inputs: int, outputs: int) -> None:
    kernels = CpuKernels(PortableOps(), prepack)
    weight, bias, x = make_layer(inputs, outputs)
    packed = kernels.pack(weight, bias)
    order = torch.randperm(130, generator=torch.Generator().manual_seed(2))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = kernels.linear(x, packed)
        torch.set_num_threads(2)
        two = kernels.linear(x[order], packed)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(two, one[order])


@pytest.mark.parametrize("prepack", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [*MODEL_SHAPES, *ODD_SHAPES])
def test_products_agree_with_float64(prepack: bool, inputs: int, outputs: int) -> None:
    weight, bias, x = make_layer(inputs, outputs)
    kernels = CpuKernels(PortableOps(), prepack)
    for b in (None, bias):
        expected = F.linear(x[:9].double(), weight.double(), None if b is None else b.double())
        out = kernels.linear(x[:9], kernels.pack(weight, b))
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("prepack", [True, False])
def test_no_rows_and_strided_rows(prepack: bool, threads: int) -> None:
    kernels = CpuKernels(PortableOps(), prepack)
    weight, bias, x = make_layer(64, 24)
    packed = kernels.pack(weight, bias)
    assert kernels.linear(x[:0], packed).shape == (0, 24)
    wide = torch.cat((x, x), dim=1)
    assert torch.equal(kernels.linear(wide[:, 64:], packed), kernels.linear(x, packed))


@pytest.mark.parametrize("prepack", [True, False])
def test_a_view_of_a_weight_packs_like_its_copy(prepack: bool) -> None:
    kernels = CpuKernels(PortableOps(), prepack)
    weight, _, x = make_layer(64, 24)
    view = weight.t().contiguous().t()
    assert torch.equal(kernels.linear(x, kernels.pack(view)), kernels.linear(x, kernels.pack(weight)))


def test_torch_backend_is_f_linear() -> None:
    weight, bias, x = make_layer(33, 65)
    kernels = TorchKernels()
    assert torch.equal(kernels.linear(x, kernels.pack(weight, bias)), F.linear(x, weight, bias))

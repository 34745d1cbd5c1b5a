"""Norms, rotation, activation and the KV write: against float64, and bit for bit whatever rows stand beside."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from verdraft.kernels.base import Kernels
from verdraft.kernels.cpu import CpuKernels
from verdraft.kernels.native import NativeOps
from verdraft.kernels.portable import PortableOps

WIDTHS = (8, 40, 576, 577, 4096)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def row_ops(kernels: Kernels, width: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Every operation from rows [T, width] to rows."""
    weight, bias = randn(width, seed=1), randn(width, seed=2)

    def rope(x: Tensor) -> Tensor:
        q, k = (x[:, : width // 2 * 2].clone()[:, None] for _ in range(2))
        angles = torch.outer(x[:, 0], torch.arange(width // 2) / width)
        kernels.rope(q, k, angles.cos(), angles.sin())
        return torch.cat((q, k), dim=1).flatten(1)

    return {
        "rms_norm": lambda x: kernels.rms_norm(x, weight, 1e-5),
        "layer_norm": lambda x: kernels.layer_norm(x, weight, bias, 1e-5),
        "silu_mul": lambda x: kernels.silu_mul(x.repeat(1, 2)),
        "rope": rope,
    }


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_alone_equal_rows_of_a_batch(exact: Kernels, width: int) -> None:
    x = randn(65, width) * 3
    for name, op in row_ops(exact, width).items():
        alone = torch.cat([op(row) for row in x.split(1)])
        for rows in (1, 2, 3, 16, 64, 65):
            assert torch.equal(op(x[:rows]), alone[:rows]), (name, rows)


@pytest.mark.parametrize("width", WIDTHS)
def test_threads_and_order_change_nothing(exact: Kernels, width: int, restore_threads: None) -> None:
    x = randn(130, width) * 3
    order = torch.randperm(130, generator=torch.Generator().manual_seed(3))
    for name, op in row_ops(exact, width).items():
        torch.set_num_threads(1)
        one = op(x)
        torch.set_num_threads(2)
        assert torch.equal(op(x[order]), one[order]), name


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_and_activation_agree_with_float64(kernels: Kernels, width: int) -> None:
    x, ops = randn(9, width) * 5 + 1, row_ops(kernels, width)
    weight, bias, wide = randn(width, seed=1).double(), randn(width, seed=2).double(), x.double()
    expected = {
        "rms_norm": F.rms_norm(wide, (width,), weight, 1e-5),
        "layer_norm": F.layer_norm(wide, (width,), weight, bias, 1e-5),
        "silu_mul": F.silu(wide) * wide,
    }
    for name, value in expected.items():
        torch.testing.assert_close(ops[name](x).double(), value, rtol=2e-6, atol=4e-6, msg=name)


def test_activation_at_the_ends_of_the_range(exact: Kernels) -> None:
    gate = torch.tensor([[-1e4, -100.0, -0.0, 0.0, 1e-30, 100.0, 1e4, 3e38]])
    out = exact.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    torch.testing.assert_close(out, F.silu(gate), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dim", [8, 32, 40, 64, 128])
def test_rope_rotates_halves_of_views_in_place(kernels: Kernels, dim: int) -> None:
    fused = randn(5, 6 * dim)
    q, k = fused[:, : 3 * dim].view(5, 3, dim), fused[:, 3 * dim : 5 * dim].view(5, 2, dim)
    v = fused[:, 5 * dim :].clone()
    angles = randn(5, dim // 2, seed=1)
    expected = [rotated(x.double(), angles.double()) for x in (q, k)]
    kernels.rope(q, k, angles.cos(), angles.sin())
    torch.testing.assert_close(q.double(), expected[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(k.double(), expected[1], rtol=0, atol=2e-6)
    assert torch.equal(fused[:, 5 * dim :], v)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("dim", [8, 40, 64])
def test_rotating_into_the_pool_is_rotating_and_writing(kernels: Kernels, dim: int) -> None:
    fused, angles, slots = randn(5, 7 * dim).view(5, 7, dim), randn(5, dim // 2, seed=1), torch.tensor([9, 2, 4, 11, 0])
    q, k, v = fused.clone().split_with_sizes((3, 2, 2), 1)
    one, two = (kernels.pool(1, 3, 4, 2, dim, torch.float32, torch.device("cpu"))[0] for _ in range(2))
    kernels.rope_write(q, k, v, one, slots, angles.cos(), angles.sin())
    old_q, old_k, old_v = fused.split_with_sizes((3, 2, 2), 1)
    kernels.rope(old_q, old_k, angles.cos(), angles.sin())
    kernels.write(old_k, old_v, two, slots)
    assert torch.equal(q, old_q)
    assert torch.equal(v, old_v)
    assert torch.equal(one.k, two.k)
    assert torch.equal(one.v, two.v)


def test_a_norm_that_adds_keeps_the_sum(kernels: Kernels) -> None:
    x, residual, weight = randn(5, 96), randn(5, 192, seed=1)[:, 96:], randn(96, seed=2)
    total, before = x + residual, residual.clone()
    normed = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(x, total)
    assert torch.equal(residual, before)
    assert torch.equal(normed, kernels.rms_norm(total, weight, 1e-5))


def test_no_rows(kernels: Kernels) -> None:
    empty = torch.empty(0, 16)
    for name, op in row_ops(kernels, 16).items():
        assert op(empty).shape[0] == 0, name


def test_strided_rows_give_the_bits_of_contiguous_ones(exact: Kernels) -> None:
    x = randn(7, 96)
    for name, op in row_ops(exact, 32).items():
        assert torch.equal(op(x[:, 32:64]), op(x[:, 32:64].contiguous())), name


def test_a_write_touches_its_slots_only(kernels: Kernels) -> None:
    layer = kernels.pool(1, 3, 4, 2, 8, torch.float32, torch.device("cpu"))[0]
    k, v = randn(3, 2, 8, seed=1), randn(3, 2, 8, seed=2)
    kernels.write(k, v, layer, torch.tensor([9, 2, 4]))
    for pages, values in ((layer.k, k), (layer.v, v)):
        stored = pages.flatten().nonzero().numel()
        assert stored == values.numel()
        assert torch.equal(pages[pages != 0].sort().values, values.flatten().sort().values)


def test_fallback_is_close_to_native(native: NativeOps) -> None:
    x = randn(17, 576) * 3
    portable = row_ops(CpuKernels(PortableOps()), 576)
    for name, op in row_ops(CpuKernels(native), 576).items():
        torch.testing.assert_close(op(x), portable[name](x), rtol=2e-6, atol=4e-6, msg=name)

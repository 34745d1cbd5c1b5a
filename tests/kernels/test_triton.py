"""What Triton's kernels bring beside the other backends: half precision, the deterministic product, and compiled code.

Through the interpreter, which multiplies matrices in NumPy: it shows sums and addresses, not the bits of a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from verdraft.kernels.base import Batch
from verdraft.kernels.blocks import quantize
from verdraft.kernels.float8 import round_to_float8
from verdraft.kernels.torch_ref import TorchKernels

pytest.importorskip("triton")
from verdraft.kernels.triton_kernels import TritonKernels

CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_attention_in_float16_is_torchs() -> None:
    batch = Batch(
        cu_q=torch.tensor([0, 3, 4], dtype=torch.int32),
        seq_lens=torch.tensor([70, 33], dtype=torch.int32),
        pages=torch.arange(10, dtype=torch.int32).view(2, 5),
        slots=torch.tensor([67, 68, 69, 112]),
        positions=torch.tensor([67, 68, 69, 32]),
        max_q=3,
        max_k=70,
    )
    ours, torchs = TritonKernels(), TorchKernels()
    layer = ours.pool(1, 10, 16, 2, 64, torch.float16, CPU)[0]
    ours.write(randn(160, 2, 64).half(), randn(160, 2, 64, seed=1).half(), layer, torch.arange(160))
    q = randn(4, 14, 64, seed=2).half()
    out = ours.attend(q, layer, batch, 0.125)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, torchs.attend(q, layer, batch, 0.125), rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_row_operations_in_half_precision_round_once(dtype: torch.dtype) -> None:
    ours, x, weight = TritonKernels(), randn(3, 96).to(dtype), randn(96, seed=1).to(dtype)
    wide = F.rms_norm(x.double(), (96,), weight.double(), 1e-5)
    torch.testing.assert_close(ours.rms_norm(x, weight, 1e-5), wide.to(dtype), rtol=0.008, atol=0)
    gate, up = x.double().chunk(2, 1)
    torch.testing.assert_close(ours.silu_mul(x), (F.silu(gate) * up).to(dtype), rtol=0.008, atol=0)
    q, k, angles = x.clone().view(3, 3, 32), x.clone().view(3, 3, 32), randn(3, 16, seed=2)
    turned = torch.complex(q.double()[..., :16], q.double()[..., 16:]) * torch.polar(
        torch.ones(3, 1, 16), angles[:, None]
    )
    ours.rope(q, k, angles.cos(), angles.sin())
    torch.testing.assert_close(q, torch.cat((turned.real, turned.imag), 2).to(dtype), rtol=0.008, atol=1e-6)
    assert torch.equal(q, k)


@pytest.mark.parametrize(("rows", "ins", "outs"), [(1, 32, 64), (65, 100, 33), (130, 129, 200), (700, 8, 70)])
def test_the_deterministic_product_agrees_with_float64(rows: int, ins: int, outs: int) -> None:
    exact = TritonKernels(deterministic=True)
    x, weight, bias = randn(rows, 2 * ins)[:, ins:], randn(outs, ins, seed=1), randn(outs, seed=2)
    for b in (None, bias):
        expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
        out = exact.linear(x, exact.pack(weight, b))
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)
    assert exact.linear(x[:0], exact.pack(weight)).shape == (0, outs)


@pytest.mark.parametrize(("rows", "ins", "outs"), [(1, 32, 64), (65, 100, 33), (130, 288, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_product_of_8_bits_is_that_of_its_blocks(rows: int, ins: int, outs: int, dtype: torch.dtype) -> None:
    ours = TritonKernels(quantization="int8")
    x, weight, bias = randn(rows, ins).to(dtype), randn(outs, ins, seed=1).to(dtype), randn(outs, seed=2).to(dtype)
    blocks = quantize(weight.float(), 8)
    for b in (None, bias):
        packed = ours.pack(weight, b)
        assert packed.q.dtype == torch.int8
        expected = F.linear(x.double(), blocks.expand().to(dtype).double(), None if b is None else b.double())
        tolerance = 2e-5 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(ours.linear(x, packed).double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("rows", "ins", "outs"), [(1, 32, 64), (65, 100, 33), (130, 288, 70), (3, 7, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_product_of_float8_is_that_of_its_rows(rows: int, ins: int, outs: int, dtype: torch.dtype) -> None:
    """Outputs of very different sizes, and one without weights."""
    ours = TritonKernels(deterministic=True, quantization="fp8")
    x, bias = randn(rows, 2 * ins)[:, ins:].to(dtype), randn(outs, seed=2).to(dtype)
    weight = (randn(outs, ins, seed=1) * randn(outs, 1, seed=3).exp()).to(dtype)
    weight[outs // 2] = 0.0
    for b in (None, bias):
        packed = ours.pack(weight, b)
        assert packed.q.dtype == torch.float8_e4m3fn
        wide = round_to_float8(weight).expand().double()
        expected = F.linear(x.double(), wide, None if b is None else b.double())
        tolerance = 2e-5 if dtype == torch.float32 else 2e-3
        torch.testing.assert_close(ours.linear(x, packed).double(), expected, rtol=tolerance, atol=5 * tolerance)
    assert ours.linear(x[:0], ours.pack(weight)).shape == (0, outs)


def test_only_the_deterministic_backend_calls_itself_exact() -> None:
    assert [TritonKernels(deterministic).exact for deterministic in (False, True)] == [False, True]


def test_more_slots_than_the_kernel_holds_move_too() -> None:
    ours = TritonKernels()
    layer = ours.pool(1, 40, 16, 1, 8, torch.float32, CPU)[0]
    k, v = randn(640, 1, 8), randn(640, 1, 8, seed=1)
    ours.write(k, v, layer, torch.arange(640))
    ours.move(layer, torch.arange(300), torch.arange(299, -1, -1))
    assert torch.equal(layer.k.view(640, 1, 8), torch.cat((k[:300].flip(0), k[300:])))
    assert torch.equal(layer.v.view(640, 1, 8), torch.cat((v[:300].flip(0), v[300:])))


@pytest.mark.long
def test_every_kernel_compiles_for_hopper() -> None:
    """In a process of its own, as the interpreter cannot be switched off in this one."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    script = Path(__file__).with_name("compile_triton.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("cubin") > 15

"""The Triton backend: our kernels where torch falls short, torch elsewhere. For NVIDIA GPUs, or the interpreter."""

from typing import Any

from torch import Tensor

from verdraft.kernels import triton_attention, triton_linear, triton_ops
from verdraft.kernels.base import Batch
from verdraft.kernels.blocks import Quantization, quantize
from verdraft.kernels.float8 import round_to_float8
from verdraft.kernels.torch_ref import TorchKernels, TorchKV


class TritonKernels(TorchKernels):
    """Every operation of `Kernels`. `deterministic` takes the product whose rows never depend on their number, instead
    of the quickest library's; everything else is so already, and then the backend is exact."""

    name: str = "triton"
    graphs: bool = True

    def __init__(self, deterministic: bool = False, quantization: Quantization = "none") -> None:
        self.exact = deterministic
        self._quantization = quantization

    def write(self, k: Tensor, v: Tensor, layer_kv: TorchKV, slots: Tensor) -> None:
        triton_ops.write(k, v, layer_kv, slots)

    def move(self, layer_kv: TorchKV, sources: Tensor, targets: Tensor) -> None:
        if triton_ops.can_move(sources):
            triton_ops.move(layer_kv, sources, targets)
        else:
            super().move(layer_kv, sources, targets)

    def attend(self, q: Tensor, layer_kv: TorchKV, batch: Batch, scale: float) -> Tensor:
        return triton_attention.attend(q, layer_kv, batch, scale)

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        triton_ops.rope(q, k, cos, sin)

    def rope_write(
        self, q: Tensor, k: Tensor, v: Tensor, layer_kv: TorchKV, slots: Tensor, cos: Tensor, sin: Tensor
    ) -> None:
        triton_ops.rope_write(q, k, v, layer_kv, slots, cos, sin)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return triton_ops.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return triton_ops.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return triton_ops.silu_mul(gate_up)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        if self._quantization == "int8":
            return triton_linear.pack_blocks(quantize(weight.float(), 8), bias)
        if self._quantization == "fp8":
            return triton_linear.pack_float8(round_to_float8(weight), bias)
        return super().pack(weight.contiguous(), bias)

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        if isinstance(packed, triton_linear.ScaledWeight):
            return triton_linear.scaled_linear(x, packed)
        if self.exact:
            return triton_linear.linear(x, packed.weight, packed.bias)
        return super().linear(x, packed)

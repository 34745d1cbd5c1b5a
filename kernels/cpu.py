"""The exact CPU backend, fp32: the operations of our C++ library, or of plain torch where it cannot be built.

Rows never depend on their neighbours, bit for bit. Knows no model.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verdraft.kernels.base import (
    Batch,
    DrafterWeights,
    FusedDrafter,
    FusedLayers,
    KernelUnavailable,
    LayerForm,
    LayerWeights,
)
from verdraft.kernels.blocks import Activations, Blocks, Quantization, choose_blocks, quantize
from verdraft.kernels.build import NativeUnavailable, build_native
from verdraft.kernels.fused import NativeDrafter, NativeLayers
from verdraft.kernels.native import NativeOps
from verdraft.kernels.packed import FEW_ROWS, TwoPacks
from verdraft.kernels.portable import PortableOps

_log = logging.getLogger("verdraft.kernels")


class CpuKernels:
    """Every operation of `Kernels` on fp32 CPU tensors, exact."""

    name: str = "cpu"
    page_size: int = 16
    page_sizes: tuple[int, ...] = ()
    graphs: bool = False
    exact: bool = True

    def __init__(
        self,
        ops: NativeOps | PortableOps | None = None,
        quantization: Quantization = "none",
        activations: Activations = "float",
    ) -> None:
        """Without `ops`, the native ones if they build here. `quantization` says how weights are packed, `activations`
        whether `linear` rounds what it multiplies with them."""
        self._ops: Any = ops or _best_ops()
        self._quantization, self._activations = quantization, activations

    def pool(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Sequence[Any]:
        assert dtype == torch.float32, f"cpu kernels: expected float32, got {dtype}"
        assert device.type == "cpu", f"cpu kernels: expected the CPU, got {device}"
        pool: Sequence[Any] = self._ops.pool(layers, pages, page_size, kv_heads, head_dim)
        return pool

    def write(self, k: Tensor, v: Tensor, layer_kv: Any, slots: Tensor) -> None:
        self._ops.write(k, v, layer_kv, slots)

    def move(self, layer_kv: Any, sources: Tensor, targets: Tensor) -> None:
        self._ops.move(layer_kv, sources, targets)

    def attend(self, q: Tensor, layer_kv: Any, batch: Batch, scale: float) -> Tensor:
        out: Tensor = self._ops.attend(q, layer_kv, batch, scale)
        return out

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        self._ops.rope(q, k, cos, sin)

    def rope_write(
        self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Any, slots: Tensor, cos: Tensor, sin: Tensor
    ) -> None:
        self._ops.rope(q, k, cos, sin)
        self._ops.write(k, v, layer_kv, slots)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = self._ops.rms_norm(x, weight, eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = self._ops.rms_norm(x.add_(residual), weight, eps)
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        out: Tensor = self._ops.layer_norm(x, weight, bias, eps)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out: Tensor = self._ops.silu_mul(gate_up)
        return out

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        assert weight.dtype == torch.float32, f"cpu kernels: expected a float32 weight, got {weight.dtype}"
        blocks = choose_blocks(weight, self._quantization)
        if self._activations == "int8":
            return self._ops.pack_rounded(_needed(blocks, self._quantization), bias)
        if blocks is None:
            return self._ops.pack(weight, bias)
        packed = self._ops.pack_blocks(blocks, bias)
        # "auto" takes blocks only where they are exact; the portable operations expand them to fp32 anyway.
        both = self._quantization == "auto" and isinstance(self._ops, NativeOps)
        return TwoPacks(packed, self._ops.pack(weight, bias)) if both else packed

    def pack_rounded(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        return self._ops.pack_rounded(quantize(weight, 8), bias)

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        if isinstance(packed, TwoPacks):
            packed = packed.blocks if x.shape[0] <= FEW_ROWS else packed.panels
        out: Tensor = self._ops.linear(x, packed)
        return out

    def fuse(self, layers: Sequence[LayerWeights], form: LayerForm) -> FusedLayers | None:
        return NativeLayers(self._ops.layers, layers, form) if isinstance(self._ops, NativeOps) else None

    def fuse_drafter(self, weights: DrafterWeights, form: LayerForm) -> FusedDrafter | None:
        return NativeDrafter(self._ops.drafter, weights, form) if isinstance(self._ops, NativeOps) else None


def _needed(blocks: Blocks | None, quantization: Quantization) -> Blocks:
    if blocks is None:
        raise KernelUnavailable(
            f"activations: int8 multiplies with blocks of 4 or 8 bits only, and quantization: {quantization} leaves "
            "weights as they are that no such blocks hold exactly; int8 and int4 round them"
        )
    return blocks


def _best_ops() -> NativeOps | PortableOps:
    try:
        return NativeOps(build_native())
    except NativeUnavailable as error:
        _log.warning("CPU operations run in plain torch, exact but slower: %s", error)
        return PortableOps()

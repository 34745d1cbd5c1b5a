"""The exact CPU backend, fp32: oneDNN's prepacked product and the operations of ops.cpp.

Rows never depend on their neighbours, bit for bit. Knows no model.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verdraft.kernels.base import Batch
from verdraft.kernels.native import NativeOps, NativeUnavailable, build_native
from verdraft.kernels.portable import PortableOps

_log = logging.getLogger("verdraft.kernels")

# Seen with oneDNN 3.12 on AVX-512: up to 1024 inputs every number of rows gives the same bits; above, oneDNN
# splits the inputs of a single row otherwise than those of two and more, which all agree (1 to 1024 rows,
# 1 to 16 threads). So a lone row of more inputs is computed twice, at a few per cent of its cost.
_ONE_BLOCK = 1024
_PROBE_ROWS = (1, 2, 5, 17, 33)


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """A weight for `linear`."""

    weight: Tensor  # opaque oneDNN layout if `prepacked`, else [out, in]
    bias: Tensor | None  # [out]
    prepacked: bool
    lone_row_twice: bool


class CpuKernels:
    """Every operation of `Kernels` on fp32 CPU tensors, exact."""

    name: str = "cpu"
    page_sizes: tuple[int, ...] = ()
    exact: bool = True

    def __init__(self, ops: NativeOps | PortableOps | None = None, prepack: bool = True) -> None:
        """Without `ops`, the native ones if they build here. `prepack` = False leaves oneDNN's product out."""
        self._ops: Any = ops or _best_ops()
        self._prepack = prepack and _has_prepacked_product()
        self._invariant: dict[tuple[int, ...], bool] = {}  # by weight shape, as probed

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

    def attend(self, q: Tensor, layer_kv: Any, batch: Batch, scale: float) -> Tensor:
        out: Tensor = self._ops.attend(q, layer_kv, batch, scale)
        return out

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        self._ops.rope(q, k, cos, sin)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = self._ops.rms_norm(x, weight, eps)
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        out: Tensor = self._ops.layer_norm(x, weight, bias, eps)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out: Tensor = self._ops.silu_mul(gate_up)
        return out

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> CpuLinear:
        assert weight.dtype == torch.float32, f"cpu kernels: expected a float32 weight, got {weight.dtype}"
        plain = CpuLinear(weight.contiguous(), bias, prepacked=False, lone_row_twice=False)
        if not self._prepack or weight.numel() == 0:
            return plain
        packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight)
        linear = CpuLinear(packed, bias, prepacked=True, lone_row_twice=weight.shape[1] > _ONE_BLOCK)
        return linear if self._is_invariant(weight.shape, linear) else plain

    def linear(self, x: Tensor, packed: CpuLinear) -> Tensor:
        if not packed.prepacked:
            return _rows_alone(x, packed)
        if packed.lone_row_twice and x.shape[0] == 1:
            return self.linear(x.expand(2, -1).contiguous(), packed)[:1]
        out: Tensor = _product(x, packed.weight, packed.bias, "none", [], "")
        return out

    def _is_invariant(self, shape: tuple[int, ...], linear: CpuLinear) -> bool:
        """Whether this machine's oneDNN gives a row the same bits among any number of rows, tried once per shape."""
        shape = tuple(shape)
        if shape not in self._invariant:
            rows = torch.randn(max(_PROBE_ROWS), shape[1], generator=torch.Generator().manual_seed(0))
            whole = self.linear(rows, linear)
            self._invariant[shape] = all(torch.equal(self.linear(rows[:n], linear), whole[:n]) for n in _PROBE_ROWS)
            if not self._invariant[shape]:
                _log.warning(
                    "oneDNN's product of shape %s depends on the number of rows here: rows go one by one", shape
                )
        return self._invariant[shape]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, *tail: Any) -> Any:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, *tail)


def _rows_alone(x: Tensor, packed: CpuLinear) -> Tensor:
    out = x.new_empty((x.shape[0], packed.weight.shape[0]))
    for i in range(x.shape[0]):
        # A copy of the row, because alignment may choose another code path in the library below.
        out[i] = F.linear(x[i : i + 1].clone(), packed.weight, packed.bias)[0]
    return out


def _has_prepacked_product() -> bool:
    mkldnn = torch.ops.mkldnn
    found = hasattr(mkldnn, "_reorder_linear_weight") and hasattr(mkldnn, "_linear_pointwise")
    if not found:
        _log.warning("torch has no prepacked oneDNN product: rows go through the linear layers one by one, slowly")
    return found


def _best_ops() -> NativeOps | PortableOps:
    try:
        return NativeOps(build_native())
    except NativeUnavailable as error:
        _log.warning("CPU operations run in plain torch, exact but slower: %s", error)
        return PortableOps()

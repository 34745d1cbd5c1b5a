"""Calls the C++ library: fp32 CPU operations and noise words on raw pointers. Knows no model.

The wrappers cost a few microseconds, because a small model's step makes hundreds of them.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verdraft.kernels.base import Batch, KernelUnavailable
from verdraft.kernels.blocks import Blocks
from verdraft.kernels.build import NativeUnavailable
from verdraft.kernels.hugepages import HugePages
from verdraft.kernels.noise import IntArray, Words
from verdraft.kernels.packed import NativeBlocks, NativeLinear

_LONG: Final = 1 << 24  # multiplications of a product that takes some tenths of a millisecond
_P, _I, _F, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_double
SIGNATURES: Final = {
    "verdraft_attend": (_P, _I, _P, _I, _P, _P, _P, _P, _P, _I, _I, _F),
    "verdraft_move": (_P, _P, _P, _I),
    "verdraft_write": (_P, _I, _P, _I, _P, _P, _I),
    "verdraft_rope": (_P, _I, _I, _P, _I, _I, _P, _P, _I, _I),
    "verdraft_rms_norm": (_P, _I, _P, _P, _I, _I, _F),
    "verdraft_layer_norm": (_P, _I, _P, _P, _P, _I, _I, _F),
    "verdraft_silu_mul": (_P, _I, _P, _I, _I),
    "verdraft_linear": (_P, _I, _P, _P, _P, _I, _I, _I),
    "verdraft_block_linear": (_I, _P, _I, _P, _P, _P, _I, _I, _I),
    "verdraft_rounded_linear": (_I, _P, _I, _P, _P, _P, _I, _I, _I),
    "verdraft_layers": (_P, _I, _P, _P, _P, _P, _P),
    "verdraft_drafter": (_P, _P, _P, _P, _P, _P, _P),
    "verdraft_philox": (_I, _I, _I, _P, _P, _I),
    "verdraft_contenders": (_I, _I, _I, _P, _P, _I, _D, _D, _I, _D, _D, _P, _I),
    "verdraft_payoff": (_P, _I, _P, _I, _I, _D, _P, _P),
    "verdraft_index_extend": (_P, _P, _I, _I),
    "verdraft_index_clue": (_P, _P),
    "verdraft_index_propose": (_P, _P, _I, _P, _P, _P),
}


@dataclass(frozen=True, slots=True)
class NativeKV:
    """One layer's pages in the layout of attention.cpp, and their description for it."""

    k: Tensor  # [runs, kv_heads, pages of a run, dim, page_size rounded up to the vector]
    v: Tensor  # [runs, kv_heads, pages of a run, page_size, dim rounded up to the vector]
    fields: Tensor  # [5] int64: both addresses, page_size, kv_heads, dim
    address: int  # of `fields`


class DraftCalls:
    """The functions of suffix.cpp and payoff.cpp, on addresses, from the shared library at `path`."""

    def __init__(self, path: Path) -> None:
        """Raises NativeUnavailable if the library does not load."""
        library = _load(ctypes.PyDLL, path)
        self.extend = _function(library, "verdraft_index_extend")
        self.clue = _function(library, "verdraft_index_clue")
        self.propose = _function(library, "verdraft_index_propose")
        self.clue.restype = self.propose.restype = ctypes.c_int64
        self.payoff = _function(library, "verdraft_payoff")


class NativeOps:
    """The operations of `Kernels`, and the noise words, from the shared library at `path`."""

    def __init__(self, path: Path) -> None:
        """Raises NativeUnavailable if the library does not load."""
        # Small calls keep the interpreter lock: giving it up costs more than they take, and a busy event
        # loop might not return it for milliseconds. Attention and long products give it up.
        held, released = _load(ctypes.PyDLL, path), _load(ctypes.CDLL, path)
        self._lanes, self._panel_width = _constant(held, "verdraft_lanes"), _constant(held, "verdraft_panel_width")
        self._run = _constant(held, "verdraft_run")  # pages
        self._weights = HugePages()
        self._attend = _function(released, "verdraft_attend")
        self._write, self._move = _function(held, "verdraft_write"), _function(held, "verdraft_move")
        self._rope = _function(held, "verdraft_rope")
        self._rms_norm = _function(held, "verdraft_rms_norm")
        self._layer_norm = _function(held, "verdraft_layer_norm")
        self._silu_mul = _function(held, "verdraft_silu_mul")
        self._linear, self._long_linear = _function(held, "verdraft_linear"), _function(released, "verdraft_linear")
        self._block_linears, self._rounded_linears = (
            (_function(held, name), _function(released, name))
            for name in ("verdraft_block_linear", "verdraft_rounded_linear")
        )
        self.layers, self.drafter = _function(released, "verdraft_layers"), _function(released, "verdraft_drafter")
        self._philox = _function(held, "verdraft_philox")
        self._contenders = _function(held, "verdraft_contenders")
        self._contenders.restype = ctypes.c_int64

    def pool(self, layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int) -> Sequence[NativeKV]:
        if head_dim % 8 or not 0 < head_dim <= 256:
            raise KernelUnavailable(
                f"kernels: cpu handles a head_dim that is a multiple of 8 up to 256, not {head_dim}"
            )
        keys, dim = _round_up(page_size, self._lanes), _round_up(head_dim, self._lanes)
        memory, runs = HugePages(), -(-pages // self._run)

        def layer(fields: Tensor) -> NativeKV:
            # Written at once: a page's first write makes the system find and clear it, for which no step should wait.
            k = memory.zeros(runs, kv_heads, self._run, head_dim, keys).zero_()
            v = memory.zeros(runs, kv_heads, self._run, page_size, dim).zero_()
            fields[:] = torch.tensor([k.data_ptr(), v.data_ptr(), page_size, kv_heads, head_dim])
            return NativeKV(k, v, fields, fields.data_ptr())

        return [layer(fields) for fields in torch.empty(layers, 5, dtype=torch.int64)]  # side by side for layers.cpp

    def write(self, k: Tensor, v: Tensor, layer_kv: NativeKV, slots: Tensor) -> None:
        assert slots.dtype == torch.int64
        assert slots.is_contiguous()
        self._write(
            k.data_ptr(), _stride(k), v.data_ptr(), _stride(v), layer_kv.address, slots.data_ptr(), slots.shape[0]
        )

    def move(self, layer_kv: NativeKV, sources: Tensor, targets: Tensor) -> None:
        assert sources.dtype == targets.dtype == torch.int64
        assert sources.is_contiguous() is targets.is_contiguous() is True
        self._move(layer_kv.address, sources.data_ptr(), targets.data_ptr(), sources.shape[0])

    def attend(self, q: Tensor, layer_kv: NativeKV, batch: Batch, scale: float) -> Tensor:
        pages, seq_lens, parents = batch.pages, batch.seq_lens, batch.parents
        assert pages.dtype == seq_lens.dtype == batch.cu_q.dtype == parents.dtype == torch.int32
        assert parents.shape[0] in (0, q.shape[0]), "parents: expected one for each query"
        out = q.new_empty(q.shape)
        self._attend(
            q.data_ptr(),
            _stride(q),
            out.data_ptr(),
            q.shape[1],
            layer_kv.address,
            batch.cu_q.data_ptr(),
            seq_lens.data_ptr(),
            parents.data_ptr(),  # null if empty
            pages.data_ptr(),
            pages.stride(0),
            seq_lens.shape[0],
            scale,
        )
        return out

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        tokens, half = cos.shape
        assert q.shape[2] == k.shape[2] == 2 * half, "cos: expected half a head's width"
        assert cos.dtype == sin.dtype == torch.float32
        assert cos.is_contiguous() is sin.is_contiguous() is True
        self._rope(
            q.data_ptr(),
            _stride(q),
            q.shape[1],
            k.data_ptr(),
            _stride(k),
            k.shape[1],
            cos.data_ptr(),
            sin.data_ptr(),
            half,
            tokens,
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert weight.dtype == x.dtype
        out = x.new_empty(x.shape)
        self._rms_norm(x.data_ptr(), _stride(x), weight.data_ptr(), out.data_ptr(), *x.shape, eps)
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        assert weight.dtype == x.dtype
        out = x.new_empty(x.shape)
        self._layer_norm(x.data_ptr(), _stride(x), weight.data_ptr(), bias.data_ptr(), out.data_ptr(), *x.shape, eps)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty((rows, width // 2))
        self._silu_mul(gate_up.data_ptr(), _stride(gate_up), out.data_ptr(), rows, width // 2)
        return out

    def pack(self, weight: Tensor, bias: Tensor | None) -> NativeLinear:
        outs, ins = weight.shape
        width = self._panel_width
        panels = self._weights.zeros(-(-outs // width), ins, width)
        whole = outs // width
        panels[:whole].copy_(weight[: whole * width].reshape(whole, width, ins).transpose(1, 2))
        panels[whole:, :, : outs % width].copy_(weight[whole * width :].t())
        return NativeLinear(panels, None if bias is None else bias.contiguous(), outs)

    def pack_blocks(self, blocks: Blocks, bias: Tensor | None) -> NativeBlocks:
        return self._pack(blocks, bias, rounds=False)

    def pack_rounded(self, blocks: Blocks, bias: Tensor | None) -> NativeBlocks:
        return self._pack(blocks, bias, rounds=True)

    def _pack(self, blocks: Blocks, bias: Tensor | None, rounds: bool) -> NativeBlocks:
        outs, source = blocks.q.shape[0], blocks.panels(self._panel_width, quads=rounds)
        panels = self._weights.zeros(*source.shape[:2], source.shape[2] // 4).view(torch.uint8).copy_(source)
        bias = None if bias is None else bias.contiguous()
        long_rows = 1 + (4 if rounds else 1) * _LONG // (blocks.ins * outs)
        return NativeBlocks(panels, bias, blocks.ins, outs, blocks.bits, rounds, long_rows)

    def linear(self, x: Tensor, packed: NativeLinear | NativeBlocks) -> Tensor:
        if isinstance(packed, NativeBlocks):
            return self._linear_blocks(x, packed)
        panels, (rows, ins) = packed.panels, x.shape
        assert ins == panels.shape[1], f"x: expected {panels.shape[1]} inputs, got {ins}"
        out = x.new_empty((rows, packed.outs))
        call = self._long_linear if rows * panels.numel() > _LONG else self._linear
        bias = None if packed.bias is None else packed.bias.data_ptr()
        call(x.data_ptr(), _stride(x), panels.data_ptr(), bias, out.data_ptr(), rows, ins, packed.outs)
        return out

    def _linear_blocks(self, x: Tensor, packed: NativeBlocks) -> Tensor:
        rows, ins = x.shape
        assert ins == packed.ins, f"x: expected {packed.ins} inputs, got {ins}"
        out = x.new_empty((rows, packed.outs))
        short, long = self._rounded_linears if packed.rounds else self._block_linears
        call = long if rows >= packed.long_rows else short
        bias = None if packed.bias is None else packed.bias.data_ptr()
        call(
            packed.bits,
            x.data_ptr(),
            _stride(x),
            packed.panels.data_ptr(),
            bias,
            out.data_ptr(),
            rows,
            ins,
            packed.outs,
        )
        return out

    def philox_blocks(self, seed: int, choice: int, position: int, blocks: Words) -> Words:
        """As noise.philox_blocks, about ten times as quick."""
        blocks = np.ascontiguousarray(blocks, np.uint32)
        out = np.empty((blocks.size, 4), np.uint32)
        self._philox(seed, choice, position, blocks.ctypes.data, out.ctypes.data, blocks.size)
        return out

    def contenders(
        self,
        draw: tuple[int, int, int],
        row: NDArray[np.float32],
        exact: NDArray[np.float64] | None,
        highest: float,
        temperature: float,
        limits: tuple[int, float, float],
    ) -> IntArray | None:
        """See noise.Contenders."""
        row, out = np.ascontiguousarray(row, np.float32), np.empty(64, np.int64)
        values = None if exact is None else exact.ctypes.data
        count = self._contenders(
            *draw, row.ctypes.data, values, row.size, highest, temperature, *limits, out.ctypes.data, out.size
        )
        return out[:count] if count >= 0 else None


def _load(kind: type[ctypes.CDLL], path: Path) -> ctypes.CDLL:
    try:
        return kind(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path} does not load: {error}") from error


def _function(library: ctypes.CDLL, name: str) -> Any:
    function = library[name]
    function.argtypes = SIGNATURES[name]
    function.restype = None
    return function


def _constant(library: ctypes.CDLL, name: str) -> int:
    function = library[name]
    function.restype = ctypes.c_int64
    return int(function())


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _stride(x: Tensor) -> int:
    """Floats from one row to the next; everything inside a row must be contiguous."""
    strides = x.stride()
    assert x.dtype == torch.float32, "expected float32"
    assert strides[-1] == 1, "expected rows that are contiguous inside"
    assert len(strides) == 2 or x.shape[1] == 1 or strides[1] == x.shape[2], "expected heads side by side"
    return strides[0]

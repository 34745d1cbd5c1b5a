"""Whole layers through one call of the C++ library. The wrapper is for hundreds of small operations, whose calls from
Python would cost a small model a third of its step."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verdraft.kernels.base import Batch, DrafterWeights, LayerForm, LayerWeights
from verdraft.kernels.native import NativeKV
from verdraft.kernels.packed import FEW_ROWS, fields


class _Pass(ctypes.Structure):
    """Pass of layers.cpp."""

    _fields_ = (
        ("heads", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("cu_q", "seq_lens", "parents", "pages")),
        ("pages_stride", ctypes.c_int64),
        ("sequences", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("slots", "cos", "sin")),
        ("tokens", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("few", ctypes.c_int64),
    )


def _pass(form: LayerForm, batch: Batch, cos: Tensor, sin: Tensor) -> Any:
    """By reference; what it points to must outlive the call. cos, sin: [T, dim / 2]."""
    tokens = cos.shape[0]
    assert batch.pages.dtype == batch.seq_lens.dtype == batch.cu_q.dtype == batch.parents.dtype == torch.int32
    assert batch.parents.shape[0] in (0, tokens), "parents: expected one for each token"
    return ctypes.byref(
        _Pass(
            form.num_heads,
            batch.cu_q.data_ptr(),
            batch.seq_lens.data_ptr(),
            batch.parents.data_ptr(),  # null if empty
            batch.pages.data_ptr(),
            batch.pages.stride(0),
            batch.seq_lens.shape[0],
            batch.slots.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            tokens,
            form.eps,
            form.head_dim**-0.5,
            FEW_ROWS,
        )
    )


class NativeLayers:
    """FusedLayers of fp32 CPU tensors."""

    def __init__(self, call: Any, layers: Sequence[LayerWeights], form: LayerForm) -> None:
        """`call` is verdraft_layers of layers.cpp."""
        self._call, self._form = call, form
        self._layers = tuple(layers)  # kept, because the table holds addresses
        self._table = torch.tensor([_fields(layer) for layer in layers])
        self._scratch = _floats(layers[0], form)

    def __call__(
        self, hidden: Tensor, batch: Batch, pool: Sequence[NativeKV], first: int, last: int, taps: Sequence[int]
    ) -> list[Tensor]:
        form, tokens = self._form, hidden.shape[0]
        assert hidden.dtype == torch.float32
        assert pool[last - 1].address - pool[first].address == pool[first].fields.nbytes * (last - 1 - first)
        out = hidden.clone(memory_format=torch.contiguous_format)
        cos, sin, scratch = form.cos[batch.positions], form.sin[batch.positions], out.new_empty(tokens * self._scratch)
        kept = {layer: torch.empty_like(out) for layer in taps}
        places = torch.tensor([kept[i].data_ptr() if i in kept else 0 for i in range(first, last)]) if kept else None
        self._call(
            self._table[first].data_ptr(),
            last - first,
            pool[first].address,
            out.data_ptr(),
            scratch.data_ptr(),
            None if places is None else places.data_ptr(),
            _pass(form, batch, cos, sin),
        )
        return [*kept.values(), out]


class NativeDrafter:
    """FusedDrafter of fp32 CPU tensors."""

    def __init__(self, call: Any, weights: DrafterWeights, form: LayerForm) -> None:
        """`call` is verdraft_drafter of layers.cpp."""
        self._call, self._weights, self._form = call, weights, form
        final = 0 if weights.final_norm is None else weights.final_norm.data_ptr()
        more = [weights.embedding.data_ptr(), weights.embedding_norm.data_ptr(), final, weights.adds_to_normed]
        self._table = torch.tensor([*_fields(weights.layer), *more])
        self._address = self._table.data_ptr()
        self._scratch = _floats(weights.layer, form) + 2 * fields(weights.layer.output)[-1]

    def __call__(self, features: Tensor, ids: Tensor, batch: Batch, layer_kv: NativeKV) -> Tensor:
        form = self._form
        assert features.dtype == torch.float32
        assert ids.dtype == torch.int64
        assert features.is_contiguous() is ids.is_contiguous() is True
        out = torch.empty_like(features)
        cos, sin = form.cos[batch.positions], form.sin[batch.positions]
        scratch = out.new_empty(features.shape[0] * self._scratch)
        self._call(
            self._address,
            layer_kv.address,
            features.data_ptr(),
            ids.data_ptr(),
            out.data_ptr(),
            scratch.data_ptr(),
            _pass(form, batch, cos, sin),
        )
        return out


def _floats(layer: LayerWeights, form: LayerForm) -> int:
    """What a token of verdraft_layers needs of scratch."""
    qkv, output, up = fields(layer.qkv)[-1], fields(layer.output)[-1], fields(layer.up)[-1]
    return 3 * output + qkv + form.num_heads * form.head_dim + 3 * up // 2


def _fields(layer: LayerWeights) -> list[int]:
    """Layer of layers.cpp."""
    q_norm, k_norm = (norm.data_ptr() for norm in layer.head_norms) if layer.head_norms else (0, 0)
    norms = [layer.attention_norm.data_ptr(), q_norm, k_norm, layer.mlp_norm.data_ptr()]
    return [*norms, *fields(layer.qkv), *fields(layer.output), *fields(layer.up), *fields(layer.down)]

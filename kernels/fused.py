"""Whole layers through one call of the C++ library. The wrapper is for hundreds of small operations, whose calls from
Python would cost a small model a third of its step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verdraft.kernels.base import Batch, LayerForm, LayerWeights
from verdraft.kernels.native import NativeKV
from verdraft.kernels.packed import FEW_ROWS, fields


class NativeLayers:
    """FusedLayers of fp32 CPU tensors."""

    def __init__(self, call: Any, layers: Sequence[LayerWeights], form: LayerForm) -> None:
        """`call` is verdraft_layers of layers.cpp."""
        self._call, self._form = call, form
        self._layers = tuple(layers)  # kept, because the table holds addresses
        self._table = torch.tensor([_fields(layer) for layer in layers])
        qkv, up = self._layers[0].qkv, self._layers[0].up
        self._scratch = 2 * fields(qkv)[4] + fields(qkv)[5] + form.num_heads * form.head_dim + 3 * fields(up)[5] // 2

    def __call__(
        self, hidden: Tensor, batch: Batch, pool: Sequence[NativeKV], first: int, last: int, taps: Sequence[int]
    ) -> list[Tensor]:
        form, tokens = self._form, hidden.shape[0]
        assert hidden.dtype == torch.float32
        assert pool[last - 1].address - pool[first].address == pool[first].fields.nbytes * (last - 1 - first)
        assert batch.pages.dtype == batch.seq_lens.dtype == batch.cu_q.dtype == batch.parents.dtype == torch.int32
        assert batch.parents.shape[0] in (0, tokens), "parents: expected one for each token"
        out = hidden.clone(memory_format=torch.contiguous_format)
        cos, sin, scratch = form.cos[batch.positions], form.sin[batch.positions], out.new_empty(tokens * self._scratch)
        kept = {layer: torch.empty_like(out) for layer in taps}
        places = torch.tensor([kept[i].data_ptr() if i in kept else 0 for i in range(first, last)]) if kept else None
        self._call(
            self._table[first].data_ptr(),
            last - first,
            pool[first].address,
            form.num_heads,
            out.data_ptr(),
            scratch.data_ptr(),
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
            None if places is None else places.data_ptr(),
        )
        return [*kept.values(), out]


def _fields(layer: LayerWeights) -> list[int]:
    """Layer of layers.cpp."""
    q_norm, k_norm = (norm.data_ptr() for norm in layer.head_norms) if layer.head_norms else (0, 0)
    norms = [layer.attention_norm.data_ptr(), q_norm, k_norm, layer.mlp_norm.data_ptr()]
    return [*norms, *fields(layer.qkv), *fields(layer.output), *fields(layer.up), *fields(layer.down)]

"""The flash-attention libraries behind one call, for ragged queries over pages; trees are not theirs.

Each is found or says why not, and is handed only what it takes: K and V are [pages, page_size, kv_heads, dim], sizes
int32, queries aligned with their keys at the bottom right.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from verdraft.kernels.base import Batch
from verdraft.kernels.torch_ref import TorchKV

Function: TypeAlias = Callable[..., Any]


class LibraryMissing(RuntimeError):
    """A library is not installed, too old, or made for other GPUs; the message says which."""


@dataclass(frozen=True, slots=True)
class FlashLibrary:
    """One of them; `attend` is that of Kernels, for chains."""

    name: str
    page_size: int  # to take when nobody asks for another
    page_sizes: tuple[int, ...]  # empty: any
    head_dims: Sequence[int]
    graphs: bool  # as that of Kernels
    attend: Callable[[Tensor, TorchKV, Batch, float], Tensor]


def flash_attn_3(function: Function) -> FlashLibrary:
    """flash-attn 3, for Hopper: `flash_attn_with_kvcache` takes any mix of query lengths and pages of any size. Pages
    of 64 tokens are smaller than its tiles, so that it loads keys in one and the same way for every query length."""
    return FlashLibrary("flash-attn 3", 64, (), (64, 128, 192, 256), True, partial(_attend_3, function))


def flash_attn_2(function: Function) -> FlashLibrary:
    """flash-attn 2: `flash_attn_varlen_func`, pages of multiples of 256 tokens."""
    return _second("flash-attn 2", partial(_attend_2, function))


def torch_varlen(function: Function) -> FlashLibrary:
    """torch's own copy of flash-attn 2: `varlen_attn`."""
    return _second("torch's varlen_attn", partial(_attend_varlen, function))


def _second(name: str, attend: Callable[[Tensor, TorchKV, Batch, float], Tensor]) -> FlashLibrary:
    # It chooses its kernel by the longest query, which a recording does not know.
    return FlashLibrary(name, 256, (256, 512, 768, 1024), range(8, 257, 8), False, attend)


def _attend_3(function: Function, q: Tensor, layer_kv: TorchKV, batch: Batch, scale: float) -> Tensor:
    out: Tensor = function(
        q,
        layer_kv.k,
        layer_kv.v,
        cache_seqlens=batch.seq_lens,
        page_table=batch.pages,
        cu_seqlens_q=batch.cu_q,
        max_seqlen_q=batch.max_q,
        softmax_scale=scale,
        causal=True,
    )
    return out


def _attend_2(function: Function, q: Tensor, layer_kv: TorchKV, batch: Batch, scale: float) -> Tensor:
    out: Tensor = function(
        q,
        layer_kv.k,
        layer_kv.v,
        cu_seqlens_q=batch.cu_q,
        cu_seqlens_k=F.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen_q=batch.max_q,
        max_seqlen_k=batch.max_k,
        softmax_scale=scale,
        causal=True,
        block_table=batch.pages,
    )
    return out


def _attend_varlen(function: Function, q: Tensor, layer_kv: TorchKV, batch: Batch, scale: float) -> Tensor:
    out: Tensor = function(
        q,
        layer_kv.k,
        layer_kv.v,
        batch.cu_q,
        None,
        batch.max_q,
        batch.max_k,
        scale=scale,
        window_size=(-1, 0),  # causal
        enable_gqa=q.shape[1] != layer_kv.k.shape[2],
        seqused_k=batch.seq_lens,
        block_table=batch.pages,
    )
    return out


def find_flash_library(capability: tuple[int, int]) -> FlashLibrary:
    """The best one for GPUs of this compute capability. Raises LibraryMissing with a reason for each."""
    reasons = []
    for find in (_find_3, _find_2, _find_torchs):
        try:
            return find(capability)
        except LibraryMissing as error:
            reasons.append(str(error))
    raise LibraryMissing("; ".join(reasons))


def _find_3(capability: tuple[int, int]) -> FlashLibrary:
    if capability[0] != 9:
        raise LibraryMissing(f"flash-attn 3 is for GPUs of compute capability 9, not {capability[0]}.{capability[1]}")
    return flash_attn_3(_import("flash_attn_interface", "flash_attn_with_kvcache"))


def _find_2(capability: tuple[int, int]) -> FlashLibrary:
    _require_ampere("flash-attn 2", capability)
    return flash_attn_2(_import("flash_attn", "flash_attn_varlen_func"))


def _find_torchs(capability: tuple[int, int]) -> FlashLibrary:
    _require_ampere("torch's varlen_attn", capability)
    function = _import("torch.nn.attention.varlen", "varlen_attn")
    if "block_table" not in inspect.signature(function).parameters:
        raise LibraryMissing(f"torch's varlen_attn takes no pages in torch {torch.__version__}")
    return torch_varlen(function)


def _require_ampere(name: str, capability: tuple[int, int]) -> None:
    if capability < (8, 0):
        raise LibraryMissing(f"{name} is for GPUs of compute capability 8 or more, not {capability[0]}.{capability[1]}")


def _import(module: str, name: str) -> Function:
    try:
        function: Function = getattr(importlib.import_module(module), name)
    except Exception as error:  # compiled code of others: whatever is wrong with it, other backends go on
        raise LibraryMissing(f"{module} cannot be imported ({error})") from error
    return function

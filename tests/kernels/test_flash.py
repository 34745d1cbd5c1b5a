"""What the flash-attention libraries are asked: by stand-ins with their signatures, which check the call and compute it
with torch; and which of them is found."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from verdraft.kernels.base import Batch, KernelUnavailable
from verdraft.kernels.flash_libraries import (
    FlashLibrary,
    LibraryMissing,
    find_flash_library,
    flash_attn_2,
    flash_attn_3,
    torch_varlen,
)
from verdraft.kernels.torch_ref import TorchKernels, TorchKV

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, SCALE = 6, 2, 64, 0.125


def attention(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, seq_lens: Tensor, pages: Tensor, scale: float) -> Tensor:
    """What any of the libraries must answer, and the types that all of them demand."""
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (cu_q, seq_lens, pages))
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape[2:] == v.shape[2:] == (KV_HEADS, DIM)
    num = cu_q.diff()
    places = torch.cat([torch.arange(int(n)) for n in num])
    batch = Batch(cu_q, seq_lens, pages, places, places, int(num.max()), int(seq_lens.max()))
    return TorchKernels().attend(q, TorchKV(k, v), batch, scale)


def with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: None = None, v: None = None, qv: None = None,
    rotary_cos: None = None, rotary_sin: None = None, cache_seqlens: Tensor | None = None,
    cache_batch_idx: None = None, cache_leftpad: None = None, page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: None = None, max_seqlen_q: int | None = None,
    rotary_seqlens: None = None, q_descale: None = None, k_descale: None = None, v_descale: None = None,
    softmax_scale: float | None = None, causal: bool = False,
) -> Tensor:  # fmt: skip
    """flash-attn 3, as far as we use it."""
    assert causal
    assert softmax_scale is not None
    assert cache_seqlens is not None
    assert page_table is not None
    assert cu_seqlens_q is not None
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    return attention(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale)


def varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """flash-attn 2."""
    assert causal
    assert softmax_scale is not None
    assert block_table is not None
    assert k.shape[1] % 256 == 0
    assert cu_seqlens_k.dtype == torch.int32
    seq_lens = cu_seqlens_k.diff()
    assert cu_seqlens_k[0] == 0
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(seq_lens.max())
    return attention(q, k, v, cu_seqlens_q, seq_lens, block_table, softmax_scale)


def torchs(*args: Any, **kwargs: Any) -> Tensor:
    """torch's, whose signature is at hand."""
    call = inspect.signature(varlen_attn).bind(*args, **kwargs).arguments
    assert call["window_size"] == (-1, 0)
    assert call["enable_gqa"]
    assert call["cu_seq_k"] is None
    assert call["key"].shape[1] % 256 == 0
    names = ("query", "key", "value", "cu_seq_q", "seqused_k", "block_table", "scale")
    return attention(*(call[name] for name in names))


LIBRARIES = [flash_attn_3(with_kvcache), flash_attn_2(varlen_func), torch_varlen(torchs)]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_a_library_is_asked_for_attention_over_pages(library: FlashLibrary) -> None:
    torch.manual_seed(0)
    size = library.page_size
    kv = TorchKV(*torch.randn(2, 5, size, KV_HEADS, DIM).bfloat16())
    num, seq_lens = [4, 1, 0, 30], [size + 3, 1, 7, 2 * size]
    batch = Batch(
        cu_q=torch.tensor([0, *num]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        pages=torch.tensor([[4, 1], [0, 0], [2, 0], [3, 1]], dtype=torch.int32),
        slots=torch.zeros(35, dtype=torch.int64),
        positions=torch.zeros(35, dtype=torch.int64),
        max_q=30,
        max_k=2 * size,
    )
    q = torch.randn(35, HEADS + 2 * KV_HEADS, DIM).bfloat16()[:, :HEADS]
    out = library.attend(q, kv, batch, SCALE)
    assert torch.equal(out, TorchKernels().attend(q, kv, batch, SCALE))


@pytest.mark.parametrize(
    ("capability", "reasons"),
    [((7, 5), ["capability 9, not 7.5", "capability 8 or more"]), ((8, 0), ["capability 9, not 8.0", "flash_attn "])],
)
def test_what_is_missing_is_told_for_every_library(
    capability: tuple[int, int], reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def old_varlen_attn(query: Tensor, key: Tensor) -> Tensor:
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", old_varlen_attn)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(LibraryMissing) as caught:
        find_flash_library(capability)
    for reason in (*reasons, "varlen_attn"):
        assert reason in str(caught.value)


def test_torchs_own_is_found_where_it_takes_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flash_attn_interface", "flash_attn"):
        monkeypatch.setitem(sys.modules, module, None)
    assert find_flash_library((9, 0)).name == "torch's varlen_attn"


def test_a_library_that_breaks_while_it_is_imported_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flash_attn_interface", "flash_attn"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('made for another torch')")
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_flash_library((9, 0)).name == "torch's varlen_attn"


@pytest.fixture
def make_backend() -> Callable[[FlashLibrary], Any]:
    pytest.importorskip("triton")
    from verdraft.kernels.flash import FlashKernels

    return FlashKernels


def test_the_backend_has_its_librarys_pages_and_heads(make_backend: Callable[[FlashLibrary], Any]) -> None:
    kernels = make_backend(LIBRARIES[1])
    assert (kernels.name, kernels.page_size, kernels.page_sizes[:2]) == ("flash-attn 2", 256, (256, 512))
    assert not kernels.exact
    with pytest.raises(KernelUnavailable, match="no kernel for a head_dim of 60"):
        kernels.pool(1, 1, 256, KV_HEADS, 60, torch.bfloat16, CPU)


def test_a_tree_is_computed_without_the_library(make_backend: Callable[[FlashLibrary], Any]) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("a tree reached the library")

    kernels = make_backend(flash_attn_3(refuse))
    layer = kernels.pool(1, 2, 16, KV_HEADS, DIM, torch.float32, CPU)[0]
    torch.manual_seed(0)
    kernels.write(*torch.randn(2, 32, KV_HEADS, DIM), layer, torch.arange(32))
    batch = Batch(
        cu_q=torch.tensor([0, 3], dtype=torch.int32),
        seq_lens=torch.tensor([20], dtype=torch.int32),
        pages=torch.tensor([[0, 1]], dtype=torch.int32),
        slots=torch.arange(17, 20),
        positions=torch.tensor([17, 18, 18]),
        max_q=3,
        max_k=20,
        parents=torch.tensor([-1, 0, 0], dtype=torch.int32),
    )
    q = torch.randn(3, HEADS, DIM)
    expected = TorchKernels().attend(q, layer, batch, SCALE)
    torch.testing.assert_close(kernels.attend(q, layer, batch, SCALE), expected, rtol=0, atol=2e-6)

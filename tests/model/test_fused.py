"""Layers in one call against the same layers by single operations: the same bits, whatever the batch looks like."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from verdraft.kernels.base import Batch
from verdraft.kernels.blocks import Activations, Quantization
from verdraft.kernels.chooser import choose_kernels
from verdraft.model.load import load_model
from verdraft.model.transformer import Transformer

CPU = torch.device("cpu")
PAGE, PAGES = 16, 6  # tokens of a page, pages of a sequence


def load(
    path: Path, quantization: Quantization = "none", activations: Activations = "float"
) -> tuple[Transformer, Transformer]:
    """As it is served, and by single operations."""
    kernels = choose_kernels("cpu", CPU, torch.float32, quantization, activations=activations)
    model = load_model(path, kernels, torch.float32, CPU)
    assert model.fused is not None
    return model, replace(model, fused=None)


def batch_of(starts: list[int], counts: list[int], parents: list[int]) -> Batch:
    """counts[b] tokens from starts[b] on of each sequence b."""
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    positions = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])
    pages = torch.randperm(len(counts) * PAGES, generator=torch.Generator().manual_seed(1)).view(len(counts), -1)
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return Batch(
        cu_q=torch.tensor([0, *counts]).cumsum(0).int(),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        pages=pages.int(),
        slots=pages[owner, positions // PAGE] * PAGE + positions % PAGE,
        positions=positions,
        max_q=max(counts),
        max_k=max(ends),
        parents=torch.tensor(parents, dtype=torch.int32),
    )


@torch.inference_mode()
def outputs(model: Transformer, cuts: list[int]) -> list[Tensor]:
    """What leaves the last layer: a prefill, a decoding step beside a chunk, and a tree."""
    pool, found = model.new_pool(3 * PAGES, PAGE), []
    bounds = [0, *cuts, model.config.num_layers]
    for starts, counts, parents in (
        ([0, 0, 0], [21, 1, 40], []),
        ([21, 1, 40], [1, 17, 1], []),
        ([22, 18, 41], [1, 3, 1], [-1, -1, 0, 0, -1]),
    ):
        batch = batch_of(starts, counts, parents)
        tokens = torch.randint(3, 320, (len(batch.positions),), generator=torch.Generator().manual_seed(len(found)))
        hidden = before = model.embed(tokens, batch.positions)
        unchanged = before.clone()
        for first, last in itertools.pairwise(bounds):
            hidden = model.forward(hidden, batch, pool, first, last)
        assert torch.equal(before, unchanged)
        found.append(hidden)
    return found


@pytest.mark.parametrize("cuts", [[], [1], [0, 2]])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {"num_hidden_layers": 3, "head_dim": 40, "attention_bias": True, "mlp_bias": True}),
        ("Qwen2", {"num_hidden_layers": 2}),
        ("Qwen3", {"num_hidden_layers": 2}),
    ],
)
def test_one_call_and_single_operations_have_the_same_bits(
    tiny_model: Callable[..., Path], family: str, options: dict[str, int], cuts: list[int]
) -> None:
    fused, single = load(tiny_model(family, **options))
    for found, expected in zip(outputs(fused, cuts), outputs(single, cuts), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_blocks_are_read_by_one_call_too(
    tiny_llama_path: Path, quantization: Quantization, activations: Activations
) -> None:
    fused, single = load(tiny_llama_path, quantization, activations)
    for found, expected in zip(outputs(fused, []), outputs(single, []), strict=True):
        assert torch.equal(found, expected)


def test_strided_rows_and_none(tiny_llama_path: Path) -> None:
    fused, single = load(tiny_llama_path)
    rows = torch.randn(21, 130, generator=torch.Generator().manual_seed(0))[:, 3:67]
    batch = batch_of([0], [21], [])
    found, expected = (model.forward(rows, batch, model.new_pool(PAGES, PAGE), 0, 2) for model in (fused, single))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@torch.inference_mode()
def test_what_a_layer_keeps_needs_nothing_behind_it(tiny_model: Callable[..., Path], family: str) -> None:
    """Later tokens see the same keys and values where the last layer took earlier ones no further than these."""
    model, _ = load(tiny_model(family))
    whole, spared = model.new_pool(PAGES, PAGE), model.new_pool(PAGES, PAGE)
    prompt, later = batch_of([0], [21], []), batch_of([21], [3], [])
    rows = model.embed(torch.arange(3, 24), prompt.positions)
    model.forward(rows, prompt, whole, 0, 2)
    model.write_kv(model.forward(rows, prompt, spared, 0, 1), prompt, spared, 1)
    rows = model.embed(torch.arange(30, 33), later.positions)
    assert torch.equal(model.forward(rows, later, whole, 0, 2), model.forward(rows, later, spared, 0, 2))


@pytest.mark.parametrize("taps", [[], [0], [1], [0, 1]])
def test_streams_between_layers_have_the_same_bits(tiny_llama_path: Path, taps: list[int]) -> None:
    fused, single = load(tiny_llama_path)
    rows = torch.randn(21, 64, generator=torch.Generator().manual_seed(0))
    batch = batch_of([0], [21], [])
    found, expected = (model.streams(rows, batch, model.new_pool(PAGES, PAGE), 0, 2, taps) for model in (fused, single))
    assert len(found) == len(expected) == len(taps) + 1
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_backends_of_single_operations_do_without(tiny_llama_path: Path, tiny_model: Callable[..., Path]) -> None:
    torch_kernels = choose_kernels("torch", CPU, torch.float32)
    assert load_model(tiny_llama_path, torch_kernels, torch.float32, CPU).fused is None
    assert load_model(tiny_model("OPT"), choose_kernels("cpu", CPU, torch.float32), torch.float32, CPU).fused is None

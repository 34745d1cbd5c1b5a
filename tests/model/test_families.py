"""Every family gives transformers' logits, however the prompt is cut into passes and the layers into ranges."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

PROMPT = torch.randint(3, 320, (45,), generator=torch.Generator().manual_seed(1)).tolist()

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "mistral": ("Mistral", {"sliding_window": 128}),
    "qwen2": ("Qwen2", {"hidden_size": 128}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 128, "hidden_size": 128}),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family_path(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Path:
    family, options = FAMILIES[request.param]
    return tiny_model(family, **options)


@pytest.fixture(scope="module")
def expected(family_path: Path) -> Tensor:
    return reference_logits(family_path, PROMPT)


@torch.inference_mode()
def reference_logits(path: Path, tokens: Sequence[int]) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def largest_difference(found: Tensor, expected: Tensor) -> float:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    return (found - expected).abs().max().item()


def test_whole_prompt(family_path: Path, expected: Tensor, runner: Any) -> None:
    assert expected.std() > 0.1
    assert largest_difference(runner(family_path).feed(PROMPT), expected) < 1e-4


def test_chunks(family_path: Path, expected: Tensor, runner: Any) -> None:
    sequence = runner(family_path)
    found = torch.cat([sequence.feed(PROMPT[begin : begin + 7]) for begin in range(0, len(PROMPT), 7)])
    assert largest_difference(found, expected) < 1e-4


def test_token_by_token(family_path: Path, expected: Tensor, runner: Any) -> None:
    sequence = runner(family_path)
    found = torch.cat([sequence.feed([token]) for token in PROMPT])
    assert largest_difference(found, expected) < 1e-4


def test_two_layer_ranges_are_the_same_computation(family_path: Path, expected: Tensor, runner: Any) -> None:
    whole, split = runner(family_path).feed(PROMPT), runner(family_path).feed(PROMPT, cuts=[1])
    assert torch.equal(split, whole)
    assert largest_difference(split, expected) < 1e-4


def test_forward_leaves_its_input_alone(family_path: Path, runner: Any) -> None:
    """The engine keeps the rows at a segment's boundary and may run the segment again."""
    sequence = runner(family_path)
    batch = sequence.batch(len(PROMPT))
    with torch.inference_mode():
        hidden = sequence.model.embed(torch.tensor(PROMPT), batch.positions)
        before = hidden.clone()
        sequence.model.forward(hidden, batch, sequence.pool, 0, 2)
    assert torch.equal(hidden, before)


def test_a_rejected_token_leaves_no_trace(family_path: Path, expected: Tensor, runner: Any) -> None:
    sequence = runner(family_path)
    sequence.feed([*PROMPT[:20], 5, 6, 7, 8])
    sequence.length = 20
    assert largest_difference(sequence.feed(PROMPT[20:]), expected[20:]) < 1e-4


def test_an_exact_backend_gives_the_same_bits_however_it_is_cut(family_path: Path, runner: Any) -> None:
    whole = runner(family_path).feed(PROMPT)
    sequence = runner(family_path)
    cut = torch.cat([sequence.feed(PROMPT[:30]), *(sequence.feed([token]) for token in PROMPT[30:])])
    assert torch.equal(cut, whole) or not runner.kernels.exact

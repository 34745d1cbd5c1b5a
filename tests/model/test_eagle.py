"""What an EAGLE3 head computes, against a straightforward implementation."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from verdraft.kernels.base import Kernels
from verdraft.kernels.chooser import choose_kernels
from verdraft.model.eagle import EagleConfig, EagleHead, assemble_eagle, default_aux_layers
from verdraft.model.load import load_model
from verdraft.scheduler.batches import ragged, ragged_batch, with_trees

CPU = torch.device("cpu")
BLOCK = 16
IDS = (3, 5, 8, 40, 41, 100, 319)
CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 2e-5}  # other order of sums


@pytest.fixture(params=["torch", "cpu"])
def kernels(request: pytest.FixtureRequest, unrounded_kernels: Kernels) -> Kernels:
    return unrounded_kernels if request.param == "cpu" else choose_kernels("torch", CPU, torch.float32)


EagleTensors = Callable[[EagleConfig, int], dict[str, Tensor]]

VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
    {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "head_norms": True},
    {"num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "intermediate_size": 32, "rope_theta": 500000.0},
]


class Reference:
    """One sequence, everything recomputed at every call."""

    def __init__(self, config: EagleConfig, tensors: dict[str, Tensor], embedding: Tensor) -> None:
        self.config = config
        self.tensors = tensors
        self.embedding = embedding

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", torch.zeros(()))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config.norm_eps).sqrt() * self.tensors[f"{name}.weight"]

    def fuse(self, aux: Tensor) -> Tensor:
        if self.config.norm_before_fc:
            aux = self.norm(aux, "input_norm")
        if self.config.fc_norm:
            width = self.config.target_hidden_size
            aux = torch.cat([self.norm(aux[:, i * width : (i + 1) * width], f"fc_norm.{i}") for i in range(3)], 1)
        return self.linear(aux, "fc")

    def forward(self, features: Tensor, tokens: list[int]) -> Tensor:
        """[T, hidden] for rows at positions 0 to T - 1."""
        normed = self.norm(features, "midlayer.hidden_norm")
        embedded = self.norm(self.embedding[list(tokens)], "midlayer.input_layernorm")
        residual = normed if self.config.norm_before_residual else features
        hidden = residual + self.attend(torch.cat([embedded, normed], 1))
        x = self.norm(hidden, "midlayer.post_attention_layernorm")
        gated = F.silu(self.linear(x, "midlayer.mlp.gate_proj"))
        hidden = hidden + self.linear(gated * self.linear(x, "midlayer.mlp.up_proj"), "midlayer.mlp.down_proj")
        return self.norm(hidden, "norm") if self.config.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden if self.config.norm_output else self.norm(hidden, "norm"), "lm_head")

    def attend(self, x: Tensor) -> Tensor:
        config, name = self.config, "midlayer.self_attn"
        q, k, v = (self.linear(x, f"{name}.{part}_proj").view(len(x), -1, config.head_dim) for part in "qkv")
        if config.head_norms:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        q, k = self.rotate(q), self.rotate(k)
        out = []
        for head in range(config.num_heads):
            shared = head // (config.num_heads // config.num_kv_heads)
            scores = q[:, head] @ k[:, shared].T * config.head_dim**-0.5
            hidden_keys = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
            out.append(scores.masked_fill(hidden_keys, -torch.inf).softmax(-1) @ v[:, shared])
        return self.linear(torch.cat(out, 1), f"{name}.o_proj")

    def rotate(self, x: Tensor) -> Tensor:
        """Pairs (i, i + dim / 2) as complex numbers, turned by position * theta^(-2 i / dim)."""
        half = self.config.head_dim // 2
        turn = torch.outer(torch.arange(len(x)), self.config.rope_theta ** (-torch.arange(half) / half))
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(turn), turn)[:, None]
        return torch.cat([turned.real, turned.imag], -1)


class Sequence:
    """One sequence through the pages of a head, a few rows at a time."""

    def __init__(self, head: EagleHead) -> None:
        self.head = head
        self.pool = head.new_pool(8, BLOCK)
        self.table = np.array([[5, 2, 7, 0]])

    def feed(self, features: Tensor, tokens: list[int], start: int) -> Tensor:
        batch = ragged_batch(np.array([len(tokens)]), np.array([start]), self.table, BLOCK, CPU)
        return self.head.forward(features, torch.tensor(tokens), batch, self.pool)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@torch.inference_mode()
def test_a_head_computes_what_the_paper_says(
    tiny_llama_path: Path,
    kernels: Kernels,
    tiny_eagle: EagleConfig,
    eagle_tensors: EagleTensors,
    options: dict[str, Any],
) -> None:
    """Target features in chunks through scattered pages, then rows from the drafter's own features, then again from
    the target's in their place."""
    config, target = replace(tiny_eagle, **options), load_model(tiny_llama_path, kernels, torch.float32, CPU)
    tensors = eagle_tensors(config, len(IDS))
    head = assemble_eagle(config, tensors, np.array(IDS), target)
    reference, sequence = Reference(config, tensors, target.embedding), Sequence(head)
    torch.manual_seed(0)
    aux, tokens = torch.randn(40, 3 * 64) * 3, torch.randint(0, 320, (40,)).tolist()
    features = head.fuse(aux)
    torch.testing.assert_close(features, reference.fuse(aux), **CLOSE)

    spans = ((0, 17), (17, 18), (18, 36))
    hidden = torch.cat([sequence.feed(features[a:b], tokens[a:b], a) for a, b in spans])
    expected = reference.forward(features[:36], tokens[:36])
    torch.testing.assert_close(hidden, expected, **CLOSE)
    logits = head.logits(hidden)
    assert logits.shape == (36, len(IDS))
    torch.testing.assert_close(logits, reference.logits(expected), **CLOSE)

    drafted = features[:36]
    for position in range(36, 39):  # feature of t - 1's row stands in for what the target would say of t
        drafted = torch.cat([drafted, hidden[-1:]])
        hidden = sequence.feed(hidden[-1:], [tokens[position]], position)
        torch.testing.assert_close(hidden, reference.forward(drafted, tokens[: position + 1])[-1:], **CLOSE)

    extended = sequence.feed(features[36:40], tokens[36:40], 36)
    torch.testing.assert_close(extended, reference.forward(features, tokens)[36:], **CLOSE)


def test_a_heads_own_embedding_is_used(
    tiny_llama_path: Path, kernels: Kernels, tiny_eagle: EagleConfig, eagle_tensors: EagleTensors
) -> None:
    config, target = tiny_eagle, load_model(tiny_llama_path, kernels, torch.float32, CPU)
    own = torch.randn(320, 64)
    tensors = {**eagle_tensors(config, len(IDS)), "embed_tokens.weight": own}
    head = assemble_eagle(config, tensors, np.array(IDS), target)
    features = torch.randn(2, 64)
    with torch.inference_mode():
        hidden = Sequence(head).feed(features, [7, 9], 0)
        torch.testing.assert_close(hidden, Reference(config, tensors, own).forward(features, [7, 9]), **CLOSE)


def test_a_feature_is_made_of_an_early_a_middle_and_a_late_stream() -> None:
    assert default_aux_layers(30) == (2, 15, 27)
    assert default_aux_layers(32) == (2, 16, 29)


TREE = [-1, 0, 0, 1, 2]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@torch.inference_mode()
def test_one_call_and_single_operations_have_the_same_bits(
    tiny_llama_path: Path, tiny_eagle: EagleConfig, eagle_tensors: EagleTensors, options: dict[str, Any]
) -> None:
    """A chunk, a step beside another sequence and a tree, with rounded weights; and a row has the bits that it has
    alone, so what a sequence drafts depends on nobody else."""
    config = replace(tiny_eagle, **options)
    target = load_model(tiny_llama_path, choose_kernels("cpu", CPU, torch.float32), torch.float32, CPU)
    head = assemble_eagle(config, eagle_tensors(config, len(IDS)), np.array(IDS), target)
    assert head.fused is not None
    single, pools = replace(head, fused=None), [head.new_pool(8, BLOCK) for _ in range(3)]
    tables = np.array([[5, 2, 7, 0], [1, 3, 4, 6]])
    torch.manual_seed(0)
    for starts, counts in (([0, 0], [20, 3]), ([20, 3], [1, 1]), ([21], [5])):
        arrays = ragged(np.array(counts), np.array(starts), tables[: len(counts)], BLOCK)
        if counts == [5]:
            arrays = with_trees(arrays, np.array(starts), [TREE])
        batch = arrays.placed([torch.from_numpy(array) for array in arrays.arrays])
        features, tokens = torch.randn(sum(counts), 64), torch.randint(0, 320, (sum(counts),))
        found, expected = (h.forward(features, tokens, batch, p) for h, p in zip((head, single), pools, strict=False))
        assert torch.equal(found, expected)
        assert torch.equal(head.logits(found), torch.cat([head.logits(row[None]) for row in found]))
        if len(counts) == 2:
            alone = ragged_batch(np.array(counts[1:]), np.array(starts[1:]), tables[1:], BLOCK, CPU)
            rows = slice(counts[0], None)
            assert torch.equal(head.forward(features[rows], tokens[rows], alone, pools[2]), found[rows])

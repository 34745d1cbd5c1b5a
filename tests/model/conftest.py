"""A sequence that runs through a model and its pages, a few tokens at a time."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from verdraft.kernels.base import Batch, Kernels
from verdraft.kernels.chooser import choose_kernels
from verdraft.model.load import load_model
from verdraft.model.transformer import Transformer

CPU = torch.device("cpu")
PAGE_SIZE, NUM_PAGES = 16, 32


@dataclass
class Runner:
    """One sequence over pages in a scattered order."""

    model: Transformer
    pages: list[int] = field(default_factory=lambda: torch.randperm(NUM_PAGES).tolist())
    length: int = 0

    def __post_init__(self) -> None:
        self.pool = self.model.new_pool(NUM_PAGES, PAGE_SIZE)

    def batch(self, num_tokens: int) -> Batch:
        end = self.length + num_tokens
        positions = torch.arange(self.length, end)
        pages = torch.tensor(self.pages)
        return Batch(
            cu_q=torch.tensor([0, num_tokens], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            pages=pages.to(torch.int32)[None],
            slots=pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
            positions=positions,
            max_q=num_tokens,
            max_k=end,
        )

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int], cuts: Sequence[int] = ()) -> Tensor:
        """Logits of every token; the layers run in one range, or in several that meet at `cuts`."""
        batch = self.batch(len(tokens))
        hidden = self.model.embed(torch.tensor(tokens), batch.positions)
        bounds = [0, *cuts, self.model.config.num_layers]
        for first, last in itertools.pairwise(bounds):
            hidden = self.model.forward(hidden, batch, self.pool, first, last)
        self.length += len(tokens)
        return self.model.logits(hidden)


@pytest.fixture(params=["torch", "cpu"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return choose_kernels(request.param, CPU, torch.float32)


@pytest.fixture
def runner(kernels: Kernels) -> "RunnerFactory":
    return RunnerFactory(kernels)


@dataclass
class RunnerFactory:
    """runner(path): a fresh sequence on a model folder, float32."""

    kernels: Kernels

    def __call__(self, path: Path) -> Runner:
        return Runner(load_model(path, self.kernels, torch.float32, CPU))

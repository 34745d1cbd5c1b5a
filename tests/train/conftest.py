"""A small model to train exits of, with prompts."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from verdraft.kernels.chooser import choose_kernels
from verdraft.model.load import load_model
from verdraft.model.transformer import Transformer
from verdraft.train.prompts import TrainingPrompt

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def deep_path(tiny_model: Callable[..., Path]) -> Path:
    """Four layers, vocabulary 320."""
    return tiny_model("Llama", num_hidden_layers=4)


@pytest.fixture(scope="session")
def deep(deep_path: Path) -> Transformer:
    return load_model(deep_path, choose_kernels("cpu", CPU, torch.float32), torch.float32, CPU)


@pytest.fixture
def prompts() -> list[TrainingPrompt]:
    """20 of 10 tokens; every fourth is held out."""
    draw = np.random.default_rng(0)
    return [
        TrainingPrompt("even" if i % 2 else "odd", tuple(draw.integers(3, 320, 10).tolist()), i % 4 == 3, True)
        for i in range(20)
    ]

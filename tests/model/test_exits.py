"""Exit heads: what loads, what is refused, and what a head computes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from verdraft.kernels.base import Kernels
from verdraft.model.errors import ModelError
from verdraft.model.exit_head import Exits, own_exits
from verdraft.model.load import load_model
from verdraft.model.transformer import Transformer

CPU = torch.device("cpu")


@pytest.fixture
def deep(tiny_model: Callable[..., Path], kernels: Kernels) -> Transformer:
    return load_model(tiny_model("Llama", num_hidden_layers=4), kernels, torch.float32, CPU)


def test_no_exits_leave_one_segment() -> None:
    assert not Exits()
    assert Exits().bounds(30) == (0, 30)


def test_own_exits_are_the_final_norm_and_the_whole_head(deep: Transformer) -> None:
    exits = own_exits(deep, (1, 3))
    hidden = torch.randn(5, deep.config.hidden_size)
    assert exits.bounds(4) == (0, 1, 3, 4)
    assert exits.check.token_ids.tolist() == list(range(deep.config.vocab_size))
    with torch.inference_mode():
        assert np.array_equal(exits.draft.logits(hidden), deep.logits(hidden).numpy())


@pytest.mark.parametrize("layers", [(0, 2), (2, 2), (3, 1), (1, 4), (-1, 2)])
def test_exits_lie_inside_the_model_in_order(deep: Transformer, layers: tuple[int, int]) -> None:
    with pytest.raises(ModelError, match="two layers in ascending order from 1 to 3"):
        own_exits(deep, layers)

"""Exits: what turns the residual stream behind an early layer into guesses at the next token (DESIGN section 4).

Everything here is draft side, free to be wrong. Knows no engine, no request and no file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from verdraft.kernels.base import Kernels
from verdraft.model.errors import ModelError
from verdraft.model.transformer import Transformer

Adapt: TypeAlias = Callable[[Tensor], Tensor]  # [n, hidden] -> [n, hidden], ready for the projection
TokenIds: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitHead:
    """Norm, adapter and a projection to a reduced vocabulary."""

    layer: int  # reads the residual stream behind layer `layer` - 1
    token_ids: TokenIds  # [R] ascending; column r of the logits belongs to token_ids[r], others cannot be drafted
    kernels: Kernels
    adapt: Adapt
    projection: Any  # packed [R, hidden]

    def logits(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, R] float32
        """Scores of the next token at each of n positions, over `token_ids`."""
        return self.kernels.linear(self.adapt(hidden), self.projection).float()


@dataclass(frozen=True, slots=True)
class Exits:
    """The heads of a model by ascending layer: none at all, or the one that drafts and the one that checks."""

    heads: tuple[ExitHead, ...] = ()

    def __post_init__(self) -> None:
        layers = [head.layer for head in self.heads]
        assert len(layers) in (0, 2), f"no exits or two, got {layers}"
        assert layers == sorted(set(layers)), f"exits must ascend, got {layers}"

    def __bool__(self) -> bool:
        return bool(self.heads)

    @property
    def draft(self) -> ExitHead:
        """The head at L_d."""
        return self.heads[0]

    @property
    def check(self) -> ExitHead:
        """The head at L_i."""
        return self.heads[1]

    def bounds(self, num_layers: int) -> tuple[int, ...]:
        """The layer indices between segments: (0, L) without exits, (0, L_d, L_i, L) with them."""
        return (0, *(head.layer for head in self.heads), num_layers)


def own_exits(model: Transformer, layers: tuple[int, int]) -> Exits:
    """The model's own final norm and whole head at two layers.

    What LayerSkip checkpoints are trained for (PAPERS 2.7); on any other model it is the "logit lens", an experiment.
    Raises ModelError for layers that are no exits of this model.
    """
    check_layers(layers, model.config.num_layers)
    every = np.arange(model.config.vocab_size, dtype=np.int64)
    return Exits(
        tuple(
            ExitHead(layer=layer, token_ids=every, kernels=model.kernels, adapt=model.final_norm, projection=model.head)
            for layer in layers
        )
    )


def check_layers(layers: tuple[int, int], num_layers: int) -> None:
    """Raises ModelError unless 0 < L_d < L_i < L."""
    if not 0 < layers[0] < layers[1] < num_layers:
        raise ModelError(
            f"exits: expected two layers in ascending order from 1 to {num_layers - 1}, got {layers[0]},{layers[1]}"
        )

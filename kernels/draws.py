"""What a sampler on a device is asked, and how it answers. Knows no kernel."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from torch import Tensor

BAD: Final = -1  # instead of a token: the row holds NaN or infinity, or leaves nothing to choose from


@dataclass(frozen=True, slots=True)
class Draws:
    """Which noise each of R rows gets, and how much of it; see noise.Noise."""

    temperatures: Tensor  # [R] float64; 0: argmax
    seeds: Tensor  # [R] int64
    choices: Tensor  # [R] int64
    positions: Tensor  # [R] int64: OUTPUT positions


# Logits [R, C], draws, and the token ids [C] int64 of the columns or None: tokens [R] int64, or BAD.
Sampler: TypeAlias = Callable[[Tensor, Draws, Tensor | None], Tensor]

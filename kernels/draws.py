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


@dataclass(frozen=True, slots=True)
class Edits:
    """What is added to single logits before anything else: bias, or -infinity for tokens that may not come. No place
    has two."""

    rows: Tensor  # [E] int64
    tokens: Tensor  # [E] int64
    values: Tensor  # [E] float64

    def of(self, logits: Tensor) -> Tensor:  # [R, V]
        """In float64, as sampling.processed; without any, `logits` as they are."""
        if not self.rows.shape[0]:
            return logits
        wide, at = logits.double(), (self.rows, self.tokens)
        wide[at] = (wide[at] + self.values).where(self.values.isfinite(), self.values)  # NaN may be forbidden too
        return wide


# Logits [R, C], draws, and the token ids [C] int64 of the columns or None: tokens [R] int64, or BAD.
Sampler: TypeAlias = Callable[[Tensor, Draws, Tensor | None], Tensor]

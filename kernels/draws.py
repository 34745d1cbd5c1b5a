"""What a sampler on a device is asked, and how it answers. Knows no kernel."""

from dataclasses import dataclass
from typing import Final, Protocol

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


class Sampler(Protocol):
    """Finds the law's tokens where the logits are."""

    def __call__(
        self, logits: Tensor, draws: Draws, token_ids: Tensor | None = None, margins: Tensor | None = None
    ) -> Tensor:
        """Tokens [R] int64 of logits [R, C], of equals the lowest; BAD where there is none.

        Column c belongs to token c, or with `token_ids` [C] int64, ascending, to that one of a reduced vocabulary: its
        noise is the token's own. `margins` [R] float64 take by how much the token's logit might have been lower before
        another token had come.
        """
        ...

"""What a sampler on a device is asked, and how it answers. Knows no kernel."""

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from verdraft.kernels.sampling import HUGE

BAD: Final = -1  # instead of a token: the row holds NaN or infinity, or leaves nothing to choose from
UNSURE: Final = -2  # or a mask that the device does not know may leave other tokens than the filters kept


@dataclass(frozen=True, slots=True)
class Draws:
    """Which noise each of R rows gets (noise.Noise), how much of it, and which tokens may come (sampling.kept_tokens).

    A device keeps tokens as the host does, but for sums that differ by less than a billionth.
    """

    temperatures: Tensor  # [R] float64; 0: argmax
    seeds: Tensor  # [R] int64
    choices: Tensor  # [R] int64
    positions: Tensor  # [R] int64: OUTPUT positions
    limits: Tensor | None = None  # [R, 4] float64: top_k, 0: off; top_p, 1: off; the least score, -infinity: off;
    # and whether only a token counts that is kept under every mask which allows it: if that wins among all
    most: int = 0  # the largest top_k of any row that has a top_p, too


@dataclass(frozen=True, slots=True)
class Penalties:
    """What earlier tokens change before anything else, in the P rows where they do; see sampling.LogitParams.

    The history of a row is a part of `known`, but for the tokens that `drafted` counts anew: those of its own path.
    """

    size: int  # of all P histories together
    rows: Tensor  # [3, P] int64: which row, where in `known` its history begins, how long it is
    factors: Tensor  # [3, P] float64: repetition, presence and frequency penalty
    known: Tensor  # [2, H] int64: distinct tokens, how often the output holds each
    drafted: Tensor  # [3, O] int64: which of the P rows, token, count

    def of(self, logits: Tensor) -> Tensor:  # [R, V]
        """In float64, as sampling.processed."""
        wide, (_, starts, sizes) = logits.double(), self.rows
        owners = torch.repeat_interleave(sizes, output_size=self.size)
        places = torch.arange(self.size, device=logits.device) + (starts + sizes - sizes.cumsum(0))[owners]
        self._penalise(wide, logits, owners, *self.known[:, places])
        self._penalise(wide, logits, *self.drafted)
        return wide

    def _penalise(self, wide: Tensor, logits: Tensor, owners: Tensor, tokens: Tensor, counts: Tensor) -> None:
        at, (repetition, presence, frequency) = (self.rows[0, owners], tokens), self.factors[:, owners]
        values = logits[at].double()
        scaled = torch.where(values > 0.0, values / repetition, values * repetition).clamp(-HUGE, HUGE)
        wide[at] = scaled.where(values.isfinite(), values) - presence * (counts > 0) - frequency * counts


@dataclass(frozen=True, slots=True)
class Edits:
    """What is added to single logits then: bias, or -infinity for tokens that may not come. No place has two."""

    rows: Tensor  # [E] int64
    tokens: Tensor  # [E] int64
    values: Tensor  # [E] float64

    def of(self, logits: Tensor) -> Tensor:  # [R, V]
        """In float64, as sampling.processed; those of float64 are changed themselves."""
        wide, at = logits.double(), (self.rows, self.tokens)
        wide[at] = (wide[at] + self.values).where(self.values.isfinite(), self.values)  # NaN may be forbidden too
        return wide


def weight_of_one(columns: int) -> float:
    """What a probability counts that is as large as the largest. Sums of whole numbers depend on no order, and those of
    so many columns fit 63 bits."""
    return 2.0 ** (62 - columns.bit_length())


class Sampler(Protocol):
    """Finds the law's tokens where the logits are."""

    def __call__(
        self, logits: Tensor, draws: Draws, token_ids: Tensor | None = None, margins: Tensor | None = None
    ) -> Tensor:
        """Tokens [R] int64 of logits [R, C], of equals the lowest; BAD or UNSURE where there is none.

        Column c belongs to token c, or with `token_ids` [C] int64, ascending, to that one of a reduced vocabulary: its
        noise is the token's own. `margins` [R] float64 take by how much the token's logit might have been lower before
        another token had come, in rows without limits.
        """
        ...

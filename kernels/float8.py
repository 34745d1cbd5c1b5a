"""Weights of 8 bits as floats (e4m3: four bits of exponent, three of mantissa), each output scaled as a whole.

Knows no product. Every such float is one of the 16-bit types too, so a product may scale its sums instead of weights.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from verdraft.kernels.base import KernelUnavailable

FLOAT8: Final = torch.float8_e4m3fn
_ROWS: Final = 4096  # outputs rounded together, to save memory


@dataclass(frozen=True, slots=True)
class Float8Rows:
    """A weight [outs, ins]: scale * q."""

    q: Tensor  # [outs, ins] float8_e4m3fn
    scale: Tensor  # [outs] float32

    def expand(self) -> Tensor:
        """The float32 weight [outs, ins] that these rows stand for."""
        return self.q.float() * self.scale.unsqueeze(1)


def round_to_float8(weight: Tensor) -> Float8Rows:
    """A weight [outs, ins] of any float type, the largest of each output as the largest float of 8 bits. Raises
    KernelUnavailable for weights that are infinite or NaN."""
    parts = [_round(part.float()) for part in torch.split(weight, _ROWS)]
    rows = Float8Rows(torch.cat([part.q for part in parts]), torch.cat([part.scale for part in parts]))
    if not rows.scale.isfinite().all():
        raise KernelUnavailable("quantization: fp8 cannot hold a weight that is infinite or NaN")
    return rows


def _round(weight: Tensor) -> Float8Rows:
    # No scale is 0, also where all weights of an output are.
    scale = (weight.abs().amax(1) / torch.finfo(FLOAT8).max).clamp(min=torch.finfo(torch.float32).tiny)
    return Float8Rows((weight / scale.unsqueeze(1)).to(FLOAT8), scale)

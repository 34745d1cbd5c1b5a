"""How weights that only draft are packed. They may be wrong, so they are rounded to what reads fastest."""

from typing import Any

import torch
from torch import Tensor

from verdraft.kernels.base import Kernels
from verdraft.kernels.blocks import choose_blocks


def rounded(weight: Tensor) -> Tensor:  # [out, in]
    """The weight in at most 8 bits where that is quick, on a CPU in float32; elsewhere as it is."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return weight
    blocks = choose_blocks(weight, "int8")
    return weight if blocks is None else blocks.expand()


def pack_rounded(kernels: Kernels, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A drafter's weight [out, in] for `linear`."""
    return kernels.pack(rounded(weight), bias)

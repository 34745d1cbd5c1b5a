"""Weights of 4 and 8 bits in groups of 32 inputs, the blocks of GGUF's Q4_1 and Q8_0, and their order in memory.

Knows no product. A weight that such blocks were expanded to is found again exactly: its smallest and largest values
tell the scale. For all others, 4 bits mean the 16 steps from a group's smallest weight to its largest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from verdraft.kernels.base import KernelUnavailable

Bits: TypeAlias = Literal[4, 8]
Quantization: TypeAlias = Literal["auto", "none", "int8", "int4", "fp8"]  # of weights
Activations: TypeAlias = Literal["float", "int8"]  # what a product's inputs are rounded to

GROUP = 32
_BITS: Final[Mapping[str, Bits]] = {"int8": 8, "int4": 4}
_ROWS = 4096  # outputs quantised together, to save memory


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight [outs, ins]: scale * q, and for 4 bits + minimum. The inputs are filled up to whole groups."""

    ins: int
    bits: Bits
    q: Tensor  # [outs, groups, 32]: uint8 0..15, or int8
    scale: Tensor  # [outs, groups] float16
    minimum: Tensor  # [outs, groups] float16; zeros for 8 bits

    def expand(self) -> Tensor:
        """The float32 weight [outs, ins] that these blocks stand for. Only the sum rounds: a half times a small
        integer fits a float."""
        weight = self.q * self.scale.float().unsqueeze(-1) + self.minimum.float().unsqueeze(-1)
        return weight.flatten(1)[:, : self.ins]

    def panels(self, width: int, quads: bool = False) -> Tensor:
        """uint8 [panels, groups, bytes] as quantized.cpp reads them, or rounded.cpp, which wants four inputs of an
        output side by side: `quads`. The outputs are filled up to whole panels."""
        halves = [self.scale, self.minimum] if self.bits == 4 else [self.scale]
        parts = [_by_panel(half, width).transpose(1, 2).contiguous().view(torch.uint8) for half in halves]
        q = _by_panel(self.q, width)  # [panels, width, groups, 32]
        if self.bits == 4:
            q = q[..., :16] | q[..., 16:] << 4 if quads else q[..., 0::2] | q[..., 1::2] << 4
        unit = 4 if quads or self.bits == 4 else 1  # bytes of an output side by side
        words = q.reshape(*q.shape[:3], -1, unit).permute(0, 2, 3, 1, 4)
        return torch.cat([*parts, words.contiguous().view(torch.uint8).flatten(2)], 2)


def choose_blocks(weight: Tensor, quantization: Quantization) -> Blocks | None:
    """The fewest bits that hold a float32 weight [outs, ins] exactly; if none do, those of `quantization`.

    None: the weight stays as it is, which "auto" prefers to changing it. Raises KernelUnavailable for weights that a
    half cannot hold.
    """
    if quantization == "none" or weight.numel() == 0:
        return None
    if exact := _quantize_exactly(weight, 4) or _quantize_exactly(weight, 8):
        return exact
    return None if quantization == "auto" else quantize(weight, _BITS[quantization])


def quantize(weight: Tensor, bits: Bits) -> Blocks:
    """A float32 weight [outs, ins] in `bits`. Raises KernelUnavailable for weights that a half cannot hold."""
    blocks = _join([_quantize(part, bits) for part in torch.split(weight, _ROWS)])
    if not (blocks.scale.isfinite().all() and blocks.minimum.isfinite().all()):
        raise KernelUnavailable(f"quantization: int{bits} cannot hold a weight that is infinite, NaN or beyond 65504")
    return blocks


def _quantize_exactly(weight: Tensor, bits: Bits) -> Blocks | None:
    """None if the blocks would change the weight; most others show that in their first rows."""
    done = []
    for part in (weight[:1], *torch.split(weight[1:], _ROWS)):
        blocks = _quantize(part, bits)
        if not torch.equal(blocks.expand(), part):
            return None
        done.append(blocks)
    return _join(done)


def _quantize(weight: Tensor, bits: Bits) -> Blocks:
    groups = F.pad(weight, (0, -weight.shape[1] % GROUP)).view(weight.shape[0], -1, GROUP)
    low, high = groups.aminmax(dim=-1)
    if bits == 4:
        minimum = low.half()
        scale = ((high - minimum.float()) / 15).clamp_(min=0).half()
    else:
        minimum = torch.zeros_like(low, dtype=torch.float16)
        scale = (torch.maximum(high, -low) / 127).half()
    inverse = torch.where(scale == 0, 0.0, 1 / scale.float())
    q = ((groups - minimum.float().unsqueeze(-1)) * inverse.unsqueeze(-1)).round_()
    q = q.clamp_(0, 15).byte() if bits == 4 else q.clamp_(-127, 127).to(torch.int8)
    return Blocks(weight.shape[1], bits, q, scale, minimum)


def _join(parts: Sequence[Blocks]) -> Blocks:
    q, scale, minimum = (torch.cat([getattr(part, name) for part in parts]) for name in ("q", "scale", "minimum"))
    return Blocks(parts[0].ins, parts[0].bits, q, scale, minimum)


def _by_panel(x: Tensor, width: int) -> Tensor:  # [outs, ...] -> [panels, width, ...]
    missing = x.new_zeros((-x.shape[0] % width, *x.shape[1:]))
    return torch.cat([x, missing]).view(-1, width, *x.shape[1:])

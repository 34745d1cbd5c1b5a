"""Weights as the C++ products read them."""

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from verdraft.kernels.blocks import Bits

FEW_ROWS: Final = 12  # up to here a product waits for memory, so blocks win; beyond, expanding them costs more


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """A weight in the panels of product.cpp."""

    panels: Tensor  # [outs / width, ins, width], filled up with zeros
    bias: Tensor | None  # [outs]
    outs: int

    @property
    def ins(self) -> int:
        return self.panels.shape[1]


@dataclass(frozen=True, slots=True)
class NativeBlocks:
    """A weight in the panels of quantized.cpp, or of rounded.cpp, which rounds its inputs."""

    panels: Tensor  # uint8 [outs / width, groups, bytes]
    bias: Tensor | None  # [outs]
    ins: int
    outs: int
    bits: Bits
    rounds: bool
    long_rows: int  # so many rows take some tenths of a millisecond


@dataclass(frozen=True, slots=True)
class TwoPacks:
    """One weight twice, with equal bits: few rows read the small blocks, more rows the fp32 panels."""

    blocks: NativeBlocks
    panels: NativeLinear


def fields(packed: NativeLinear | NativeBlocks | TwoPacks) -> list[int]:
    """Linear of layers.cpp: whether inputs are rounded, bits, addresses of blocks, panels and bias, inputs, outputs.
    `packed` must outlive it."""
    match packed:
        case NativeLinear():
            form = [False, 0, 0, packed.panels.data_ptr()]
        case NativeBlocks():
            form = [packed.rounds, packed.bits, packed.panels.data_ptr(), 0]
        case TwoPacks():
            of_blocks, of_panels = fields(packed.blocks), fields(packed.panels)
            return [*of_blocks[:3], of_panels[3], *of_blocks[4:]]
    bias = 0 if packed.bias is None else packed.bias.data_ptr()
    return [*form, bias, packed.ins, packed.outs]

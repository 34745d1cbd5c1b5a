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
    """A weight in the panels of quantized.cpp."""

    panels: Tensor  # uint8 [outs / width, groups, bytes]
    bias: Tensor | None  # [outs]
    ins: int
    outs: int
    bits: Bits
    long_rows: int  # so many rows take some tenths of a millisecond


@dataclass(frozen=True, slots=True)
class TwoPacks:
    """One weight twice, with equal bits: few rows read the small blocks, more rows the fp32 panels."""

    blocks: NativeBlocks
    panels: NativeLinear


def fields(packed: NativeLinear | NativeBlocks | TwoPacks) -> list[int]:
    """Linear of layers.cpp: bits, addresses of blocks, panels and bias, inputs, outputs. `packed` must outlive it."""
    blocks = packed.blocks if isinstance(packed, TwoPacks) else packed if isinstance(packed, NativeBlocks) else None
    panels = packed.panels if isinstance(packed, TwoPacks) else packed if isinstance(packed, NativeLinear) else None
    either = blocks or panels
    assert either is not None
    bits, of_blocks = (blocks.bits, blocks.panels.data_ptr()) if blocks else (0, 0)
    of_panels = panels.panels.data_ptr() if panels else 0
    bias = 0 if either.bias is None else either.bias.data_ptr()
    return [bits, of_blocks, of_panels, bias, either.ins, either.outs]

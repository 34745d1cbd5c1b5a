"""A process's part of a model whose layers several share: which outputs of every product are its own.

Products are split by their outputs and never by their inputs, so that every output is the one sum that it is in a
single process: the number of processes cannot change a bit, and with it no token. Knows no process.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from verdraft.model.config import ModelConfig
from verdraft.model.errors import ModelError


def _alone(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True)
class Part:
    """Part `rank` of `size`. `gather` puts the columns of all parts side by side: [T, n] -> [T, size * n]."""

    rank: int = 0
    size: int = 1
    gather: Callable[[Tensor], Tensor] = _alone

    def rows(self, weight: Tensor) -> Tensor:
        """This part of a weight's outputs, which come first in its shape."""
        return weight if self.size == 1 else weight.chunk(self.size)[self.rank].contiguous()


WHOLE = Part()


def check_divides(config: ModelConfig, size: int) -> None:
    """Raises ModelError for a model that cannot be shared by so many."""
    widths = {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_size": config.hidden_size,
    }
    for name, width in widths.items():
        if width % size:
            raise ModelError(f"tensor_parallel: {size} processes cannot share a model whose {name} is {width}")

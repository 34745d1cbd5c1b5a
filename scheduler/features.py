"""What an EAGLE head knows of one sequence, and what it has not seen yet.

positions:  first ......... computed ......... end
            <- drafter's KV -><--- waiting ---->    the target's hidden states, three a position
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Features:
    """Row t pairs what the target computed at position t with token t + 1, so `end` is where the next pass begins.

    Nothing is known before `first`, the beginning of a block: of what the prefix cache had and no drafter has seen, or
    of what waited for long because nothing was drafted. A draft needs little of it: hidden states know their context.
    """

    first: int
    computed: int
    end: int
    waiting: list[Tensor] = field(default_factory=list)  # each [n, 3 * target_hidden]
    last: Tensor | None = None  # [1, hidden]: what the drafter made of the last computed row
    claims: tuple[float, ...] = ()  # of the current draft's tokens

    def push(self, rows: Tensor) -> None:
        """What the target computed at the next positions."""
        self.waiting.append(rows)
        self.end += rows.shape[0]

    def forget(self, most: int, block_size: int) -> None:
        """Where more than `most` rows wait, keep the newer half of so many and let the drafter begin there."""
        start = (self.end - most // 2) // block_size * block_size
        if self.end - self.computed > most and start > self.computed:
            self.waiting, self.last = [torch.cat(self.waiting)[start - self.computed :].clone()], None
            self.first = self.computed = start

    def settle(self, last: Tensor) -> None:
        """The drafter has computed all that waited."""
        self.computed, self.last = self.end, last
        self.waiting.clear()

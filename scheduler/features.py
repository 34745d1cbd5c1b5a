"""What an EAGLE head knows of one sequence, and what it has not seen yet.

positions:  first ......... computed ......... end
            <- drafter's KV -><--- waiting ---->    the target's hidden states, three a position
"""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class Features:
    """Row t pairs what the target computed at position t with token t + 1, so `end` is where the next pass begins.

    Nothing is known before `first`, the beginning of a block: blocks from the prefix cache that no drafter has seen.
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

    def settle(self, last: Tensor) -> None:
        """The drafter has computed all that waited."""
        self.computed, self.last = self.end, last
        self.waiting.clear()

"""A window: tokens that exits drafted and perhaps checked, and that the full model has not confirmed (DESIGN 4).

Knows tokens and numbers; which model, head or sequence they come from is the caller's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Cycle:
    """How exits fill a window (PAPERS section 2.3).

    L_i looks at the rows before and behind every drafted token and so always has a token of its own for the place
    behind the last one. Drafting that place at L_d too, as the paper does, would be work for nothing.
    """

    window: int  # N_i: tokens that it holds at most
    round_len: int  # N_d: tokens of one round, the last of them L_i's own
    checked: bool  # L_i checks every round (hispec), or L_d alone fills the window (early_exit)
    confidence: float = 0.0  # a head whose own probability of its token is below this is unsure of it


NO_CYCLE = Cycle(window=0, round_len=1, checked=False)


@dataclass(slots=True)
class Window:
    """One cycle's tokens. `tokens[:num_checked]` are L_i's own choices, the rest are L_d's."""

    cycle: Cycle
    limit: int  # tokens that it may hold this time
    ends: frozenset[int]  # tokens behind which nothing is worth drafting
    tokens: list[int] = field(default_factory=list)
    num_checked: int = 0
    closed: bool = False  # no more tokens
    paused: bool = False  # L_d is unsure: no more tokens before the next check

    @property
    def unchecked(self) -> tuple[int, ...]:
        """What L_d drafted since the last check."""
        return tuple(self.tokens[self.num_checked :])

    @property
    def wants_draft(self) -> bool:
        """Whether L_d is to go on before anything else happens."""
        if self.closed or self.paused:
            return False
        if not self.cycle.checked:
            return True
        return len(self.tokens) < self.limit - 1 and len(self.unchecked) < self.cycle.round_len - 1

    @property
    def wants_check(self) -> bool:
        """Whether L_i is to look at what L_d drafted, and to add or replace one token."""
        return self.cycle.checked and not self.closed

    def draft(self, token: int, sure: bool) -> None:
        """L_d's next token. One that it is unsure of is dropped: better ask L_i, or the full model."""
        if sure:
            self.tokens.append(token)
        self.paused = not sure or token in self.ends
        if not self.cycle.checked:
            self.closed = self.paused or len(self.tokens) >= self.limit

    def check(self, tokens: Sequence[int], sure: Sequence[bool]) -> None:
        """L_i's tokens in place of the unchecked ones; what follows an unsure one or an end is dropped. None: L_i has
        nothing to say."""
        kept = next((i for i, is_sure in enumerate(sure) if not is_sure), len(tokens))
        end = next((i for i, token in enumerate(tokens) if token in self.ends), len(tokens))
        self.tokens[self.num_checked :] = tokens[: min(kept, end + 1)]
        self.closed = min(kept, end) < len(tokens) or not tokens or len(self.tokens) >= self.limit
        self.num_checked, self.paused = len(self.tokens), False

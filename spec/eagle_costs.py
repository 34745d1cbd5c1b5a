"""What drafting with an EAGLE head costs and brings: how long a chain should be, and when a longer one stops paying.

Knows seconds and probabilities only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from verdraft.spec.spending import FREE, CostTable

_GRID = 20  # agreements are told apart in steps of 1 / 20: nobody knows them better


@dataclass(frozen=True, slots=True)
class EagleCosts:
    """Seconds by number of rows: of whole passes of the target, and of the parts of the drafter."""

    full: CostTable = FREE
    extend: CostTable = FREE  # features from the target's hidden states, and the drafter's layer
    layer: CostTable = FREE
    head: CostTable = FREE

    def drafting(self, length: int, windows: int = 1, waiting: int = 2) -> float:
        """Seconds for chains of `length` tokens of `windows` sequences with `waiting` new positions each."""
        if length == 0:
            return 0.0
        step = self.layer.of(windows) + self.head.of(windows)
        return self.extend.of(windows * waiting) + self.head.of(windows) + (length - 1) * step

    def best_length(self, limit: int, keep: float, windows: int = 1, rows: int = 1) -> int:
        """How many tokens, at most `limit`, bring most tokens a second; 0 when none do. `keep`: the chance that a
        token is right if all before it are. `windows` sequences draft so, of `rows` that decode together."""
        return _best_length(self, limit, round(keep * _GRID), windows, rows)

    def speed(self, length: int, keep: float, windows: int, rows: int) -> float:
        """Tokens per second of all `rows` sequences when `windows` of them draft chains of `length` tokens."""
        tokens = rows + windows * sum(keep**i for i in range(1, length + 1))
        seconds = self.full.of(rows + windows * length) + self.drafting(length, windows)
        return tokens / max(seconds, 1e-9)

    def worth_verifying(self, prob: float, rows: int) -> bool:
        """Whether a token of this probability pays for its row beside the `rows` of all that decode."""
        return prob * self.full.of(rows) >= rows * (self.full.of(rows + 1) - self.full.of(rows))

    def worth_growing(self, hopes: Sequence[float], expected: float, rows: int) -> list[bool]:
        """Which drafts should get one more level. hopes[i]: the tokens that it brings. All that decode expect
        `expected` tokens so far, from a pass over `rows` rows."""
        token = self.full.of(rows) / max(expected, 1e-9)  # seconds for which one is had anyway
        more = self.full.of(rows + 1) - self.full.of(rows)
        gains = [hope * token - more for hope in hopes]
        num = sum(gain >= 0 for gain in gains)
        step = self.layer.of(max(num, 1)) + self.head.of(max(num, 1))
        pays = sum(gain for gain in gains if gain >= 0) >= step
        return [pays and gain >= 0 for gain in gains]


@lru_cache(maxsize=4096)
def _best_length(costs: EagleCosts, limit: int, keep: int, windows: int, rows: int) -> int:
    return max(range(limit + 1), key=lambda length: costs.speed(length, keep / _GRID, windows, rows))

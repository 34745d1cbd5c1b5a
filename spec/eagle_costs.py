"""What drafting with an EAGLE head costs, and when another level stops paying.

Knows seconds and probabilities only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from verdraft.spec.spending import FREE, Costs, CostTable

_MEMORY = 0.95  # weight of the earlier draftings' times when the next one comes
_MOST = 10.0  # a drafting that takes this much longer was disturbed


@dataclass(frozen=True, slots=True)
class EagleCosts:
    """Seconds of the parts of the drafter, by number of rows."""

    extend: CostTable = FREE  # features from the target's hidden states, and the drafter's layer
    layer: CostTable = FREE
    head: CostTable = FREE
    scale: float = 1.0  # how much longer drafting takes between passes, which leave nothing of it in the caches

    def drafting(self, levels: float, count: int, waiting: int) -> float:
        """Seconds for drafts of so many levels of `count` sequences with `waiting` new positions each."""
        step = self.layer.of(count) + self.head.of(count)
        return self.scale * (self.extend.of(count * waiting) + self.head.of(count) + max(0.0, levels - 1) * step)

    def seen(self, levels: float, count: int, waiting: int, seconds: float) -> "EagleCosts":
        """These costs after such a drafting took `seconds`."""
        predicted = self.drafting(levels, count, waiting) / self.scale
        if predicted <= 0.0:
            return self
        scale = _MEMORY * self.scale + (1 - _MEMORY) * min(_MOST, max(1.0, seconds / predicted))
        return replace(self, scale=scale)

    def worth_growing(self, hopes: Sequence[float], expected: float, rows: int, full: Costs) -> list[bool]:
        """Which drafts should get one more level. hopes[i]: the tokens that it brings. All that decode expect
        `expected` tokens so far, from a pass over `rows` rows that costs `full`."""
        token = full.of(rows) / max(expected, 1e-9)  # seconds for which one is had anyway
        more = full.of(rows + 1) - full.of(rows)
        gains = [hope * token - more for hope in hopes]
        num = sum(gain >= 0 for gain in gains)
        step = self.scale * (self.layer.of(max(num, 1)) + self.head.of(max(num, 1)))
        pays = sum(gain for gain in gains if gain >= 0) >= step
        return [pays and gain >= 0 for gain in gains]

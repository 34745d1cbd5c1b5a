"""What windows that exits fill cost and bring: how long one should be, and from which agreement on they pay at all.

The cost model of PAPERS section 2.9 with measured times. Knows seconds and probabilities only.
"""

from dataclasses import dataclass
from functools import lru_cache

from verdraft.spec.spending import FREE, CostTable
from verdraft.spec.window import Cycle

_GRID = 20  # agreements are told apart in steps of 1 / 20: nobody knows them better


@dataclass(frozen=True, slots=True)
class ExitCosts:
    """Seconds by number of tokens: of whole passes, of the segments below the two exits, and of the exits' heads."""

    full: CostTable = FREE
    lowest: CostTable = FREE  # layers [0, L_d)
    middle: CostTable = FREE  # layers [L_d, L_i)
    draft_head: CostTable = FREE
    check_head: CostTable = FREE

    def best_length(self, cycle: Cycle, keep: float, agree: float, windows: int = 1, rows: int = 1) -> int:
        """The length of a window, at most cycle.window, that brings most tokens a second; 0 when none pays.

        `keep`: the chance that the full model keeps a token of the window; `agree`: that L_i agrees with L_d.
        `windows` sequences draft so, of `rows` that decode together.
        """
        return _best_length(self, cycle, round(keep * _GRID), round(agree * _GRID), windows, rows)

    def break_even(self, cycle: Cycle) -> float:
        """The least agreement, taken as the same at both exits, at which a sequence alone gains; above 1 for never."""
        return _break_even(self, cycle)

    def speed(self, cycle: Cycle, length: int, keep: float, agree: float, windows: int = 1, rows: int = 1) -> float:
        """Tokens per second of all `rows` sequences when `windows` of them have windows of `length` tokens."""
        tokens = rows - windows + windows * sum(keep**i for i in range(length + 1))
        return tokens / max(self._seconds(cycle, length, agree, windows, rows), 1e-9)

    def look(self, seen: int) -> float:
        """Seconds that L_i takes to look at `seen` tokens."""
        return self.lowest.of(seen) + self.middle.of(seen) + self.check_head.of(seen)

    def pruned(self, seen: int, rows: int, verified: int) -> float:
        """Seconds when L_i looks at `seen` tokens first and a pass with `verified` tokens follows, of which `rows`
        were not seen."""
        saved = self.lowest.of(verified) + self.middle.of(verified) - self.lowest.of(rows) - self.middle.of(rows)
        return max(self.look(seen) + self.full.of(verified) - saved, 1e-9)

    def filling(self, cycle: Cycle, length: int, agree: float, windows: int) -> float:
        """Seconds of drafting `length` tokens for `windows` sequences in lockstep."""
        draft = self.lowest.of(windows) + self.draft_head.of(windows)
        if not cycle.checked:
            return length * draft
        checked = windows * cycle.round_len
        one_round = (cycle.round_len - 1) * draft + self.lowest.of(windows)
        one_round += self.middle.of(checked) + self.check_head.of(checked)
        return one_round * length / sum(agree**i for i in range(cycle.round_len))

    def saved(self, cycle: Cycle, drafted: float, verified: float) -> float:
        """Seconds of a pass over `verified` tokens that are not needed because drafting ran the lower segments of
        `drafted` of them."""
        saved = self.lowest.of(verified) - self.lowest.of(verified - drafted)
        if cycle.checked:
            saved += self.middle.of(verified) - self.middle.of(verified - drafted)
        return saved

    def _seconds(self, cycle: Cycle, length: int, agree: float, windows: int, rows: int) -> float:
        if length == 0:
            return self.full.of(rows)
        drafted = windows * length
        whole = self.full.of(rows + drafted)
        return self.filling(cycle, length, agree, windows) + whole - self.saved(cycle, drafted, rows + drafted)


@lru_cache(maxsize=4096)
def _best_length(costs: ExitCosts, cycle: Cycle, keep: int, agree: int, windows: int, rows: int) -> int:
    def speed(length: int) -> float:
        return costs.speed(cycle, length, keep / _GRID, agree / _GRID, windows, rows)

    return max(range(cycle.window + 1), key=speed)


@lru_cache(maxsize=64)
def _break_even(costs: ExitCosts, cycle: Cycle) -> float:
    pays = (step / _GRID for step in range(_GRID + 1) if costs.best_length(cycle, step / _GRID, step / _GRID))
    return next(pays, 2.0)

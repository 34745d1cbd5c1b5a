"""How long parts of a step take in relation to one another, beside what they took alone when they were measured.

Knows seconds only. A busy machine slows everything, which changes nothing here; that windows are filled and passes
split into segments takes time which no table of passes knows.
"""

_MEMORY = 0.9  # weight of the earlier ratios when one more comes: about the last ten count
_MOST = 4.0  # a ratio beyond this is a disturbance


class Pace:
    """Learns from the expected and the real seconds of every filling and every pass."""

    def __init__(self) -> None:
        self._whole, self._split, self._filling = 1.0, 1.1, 1.5  # real seconds / expected ones

    @property
    def filling(self) -> float:
        """What expected seconds of filling windows are to be multiplied with."""
        return max(1.0, self._filling / self._whole)

    @property
    def split(self) -> float:
        """What those of a pass are to be multiplied with whose lower segments ran for windows before."""
        return max(1.0, self._split / self._whole)

    def filled(self, expected: float, seconds: float) -> None:
        """Windows were filled."""
        self._filling = _learned(self._filling, expected, seconds)

    def passed(self, expected: float, seconds: float, split: bool) -> None:
        """A pass ended."""
        if split:
            self._split = _learned(self._split, expected, seconds)
        else:
            self._whole = _learned(self._whole, expected, seconds)


def _learned(ratio: float, expected: float, seconds: float) -> float:
    return _MEMORY * ratio + (1.0 - _MEMORY) * min(_MOST, seconds / max(expected, 1e-9))

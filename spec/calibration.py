"""What a drafter's own probabilities are worth: which share of the tokens that claimed so much were right.

Knows numbers only. Part of the draft side: free to be wrong.
"""

_BINS = 12
_MEMORY = 0.998  # weight of the earlier verdicts when the next one of a bin comes: about the last five hundred count
_PRIOR = 8.0  # as if so many tokens of each bin had been seen before, right as often as they claimed
_SURE, _UNSURE = 0.99, 0.005


class Calibration:
    """Learns from every token that was judged behind an accepted one."""

    def __init__(self) -> None:
        self._seen = [_PRIOR] * _BINS
        self._right = [_PRIOR * (i + 0.5) / _BINS for i in range(_BINS)]

    def of(self, claim: float) -> float:
        """The probability, in (0, 1), that a token of this claim is right if all before it are."""
        i = _bin(claim)
        return min(_SURE, max(_UNSURE, self._right[i] / self._seen[i]))

    def learn(self, claim: float, right: bool) -> None:
        """A token that claimed so much was judged."""
        i = _bin(claim)
        self._seen[i] = _MEMORY * self._seen[i] + 1.0
        self._right[i] = _MEMORY * self._right[i] + right


def _bin(claim: float) -> int:
    return min(_BINS - 1, int(claim * _BINS))

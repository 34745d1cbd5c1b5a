"""What steps take beside what was measured of their passes: the host's own work, and all that makes a server's pass
slower than one alone. Every step takes it, however much is drafted, so tokens are worth that much more.

Knows seconds only.
"""

from collections import defaultdict

_MEMORY = 0.95  # weight of the earlier steps when one more comes: about the last twenty count
_MOST = 1.0  # of the expected seconds: a step that takes longer beyond them was disturbed


class HostTime:
    """Learns from every step that only decodes; apart for every load, as its bit length."""

    def __init__(self) -> None:
        self._seconds: defaultdict[int, float] = defaultdict(float)

    def of(self, load: int) -> float:
        """Seconds of a step in which so many sequences decode, beside its pass."""
        return self._seconds[load.bit_length()]

    def learn(self, load: int, expected: float, seconds: float) -> None:
        """A step took so many seconds, its pass as many as `expected` if it was as when passes were measured."""
        more = min(max(0.0, seconds - expected), _MOST * expected)
        known = self._seconds[load.bit_length()]
        self._seconds[load.bit_length()] = _MEMORY * known + (1.0 - _MEMORY) * more

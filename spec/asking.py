"""Whether a free source is worth asking: its drafts cost no pass, but looking for them costs time on every step.

Knows kinds of asking (how much context a match would stand on, under which load) and seconds. Where drafts of a kind
have brought less than the asking took, it is asked only now and then.
"""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

_MEMORY = 0.95  # weight of the earlier askings when the next one comes: about the last twenty count
_PATIENCE = 16  # askings of a kind before it can be left out
_TRIAL_EVERY = 16  # of the askings that are left out, one is done to see whether that is still right


@dataclass(slots=True)
class _Worth:
    """Of one kind of asking."""

    saved: float = 0.0  # seconds that a draft saves less what the asking took, on average
    asked: int = 0
    left_out: int = 0


class Asking:
    """Learns from what became of every asking."""

    def __init__(self) -> None:
        self._worth: defaultdict[Hashable, _Worth] = defaultdict(_Worth)

    def pays(self, kind: Hashable) -> bool:
        """Whether to ask this time."""
        worth = self._worth[kind]
        if worth.saved >= 0.0 or worth.asked < _PATIENCE:
            return True
        worth.left_out += 1
        return worth.left_out % _TRIAL_EVERY == 0

    def learn(self, kind: Hashable, saved: float) -> None:
        """An asking brought a draft that saves so many seconds, less what it took; negative when it was in vain."""
        worth = self._worth[kind]
        worth.saved = _MEMORY * worth.saved + (1.0 - _MEMORY) * saved
        worth.asked += 1

"""Whether a step waits for what the one before it found, so that it can draft, or its pass is begun without drafts
while that one is under way.

A device that computes by itself stands still while the host drafts. One sequence gains more by drafts than it loses so;
of many, each has to be drafted for while all of them wait. Which is more, is measured: tokens a second of either kind.

Knows numbers only.
"""

from collections import defaultdict
from dataclasses import dataclass, field

SPAN = 16  # steps of one kind, at least: the device takes a step or two to go from one to the other
FIRST_REST, LONGEST_REST = 4, 64  # spans until the other kind is tried again; it doubles while that one is slower
GLANCE, HOPELESS = 4, 0.75  # steps of a trial after which one so much slower ends
_MEMORY = 0.97  # weight of the earlier steps when one more comes: about the last thirty count


@dataclass(slots=True)
class _Rate:
    """Tokens a second."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens = _MEMORY * self.tokens + tokens
        self.seconds = _MEMORY * self.seconds + seconds

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Choice:
    """For one load: the kind that it is now, and what is known of both."""

    waits: bool = True
    rates: dict[bool, _Rate] = field(default_factory=lambda: {True: _Rate(), False: _Rate()})
    steps: int = 0  # of this span
    rest: int = FIRST_REST
    left: int = 1  # spans until the other kind is tried
    trying: bool = False

    def learn(self, waited: bool, tokens: int, seconds: float) -> None:
        self.rates[waited].add(tokens, seconds)
        self.steps += waited is self.waits
        if self.steps >= (GLANCE if self.trying and self._is_hopeless else SPAN):
            self.steps = 0
            self._decide()

    @property
    def _is_hopeless(self) -> bool:
        return self.rates[self.waits].value < HOPELESS * self.rates[not self.waits].value

    def _decide(self) -> None:
        if self.trying:
            won = self.rates[self.waits].value > self.rates[not self.waits].value
            self.waits = self.waits is won
            self.rest = FIRST_REST if won else min(2 * self.rest, LONGEST_REST)
            self.left, self.trying = self.rest, False
            return
        self.left -= 1
        if self.left <= 0:
            self.waits, self.trying = not self.waits, True
            self.rates[self.waits] = _Rate()  # of long ago


class Patience:
    """Learns from every step; apart for every load, as its bit length."""

    def __init__(self) -> None:
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)
        self._last: tuple[bool, float] | None = None

    def waits(self, load: int) -> bool:
        """Whether the next step waits, with so many sequences."""
        return self._choices[load.bit_length()].waits

    def learn(self, load: int, waited: bool, tokens: int, now: float) -> None:
        """A step of so many sequences that waited or did not has brought so many tokens, `now` in seconds."""
        last, self._last = self._last, (waited, now)
        if last and last[0] is waited:
            self._choices[load.bit_length()].learn(waited, tokens, now - last[1])

    def pause(self) -> None:
        """Nothing is under way: the next step does not follow the last."""
        self._last = None

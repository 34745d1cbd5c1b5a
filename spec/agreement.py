"""How often the full model keeps what exits drafted for one sequence, and when that is too seldom to go on.

Knows counts only. Part of the draft side: free to be wrong.
"""

from itertools import accumulate

_MEMORY = 0.97  # weight of the earlier verdicts when the next one comes: about the last thirty count
_HOPE, _HOPEFUL = 0.4, 8.0  # expected before anything was seen, as if of so many tokens: hardly enough to pay
_TRIAL = 24  # tokens judged before exits can be given up
FLOOR = 0.1  # nothing pays below this, whatever a pass costs


class Agreement:
    """Learns from every verified window. `floor` is the share of kept tokens below which exits are given up; `typical`
    is that of all sequences, which is what to expect of one of which little is known."""

    def __init__(self, floor: float = FLOOR, typical: "Agreement | None" = None) -> None:
        self.floor = floor
        self.num_windows = 0  # that were drafted, whether anybody judged them or not
        self._typical = typical
        self._kept = self._judged = 0.0
        self._num_judged = 0
        self._hopeful = _HOPEFUL

    @property
    def rate(self) -> float:
        """Share of the judged tokens that were kept, recent ones counting most."""
        hope = self._typical.rate if self._typical else _HOPE
        return (self._kept + self._hopeful * hope) / (self._judged + self._hopeful)

    @property
    def on_trial(self) -> bool:
        """Too few tokens were judged yet to say anything."""
        return self._num_judged < _TRIAL

    @property
    def given_up(self) -> bool:
        """Too little was kept; nothing is drafted any more, so this is for good."""
        return not self.on_trial and self.rate < self.floor

    def learn(self, drafted: int, accepted: int) -> None:
        """A verified draft: the accepted tokens were right, the next one wrong, and those behind it nobody judged."""
        for kept in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._kept = _MEMORY * self._kept + kept
            self._judged = _MEMORY * self._judged + 1.0
            self._hopeful *= _MEMORY
            self._num_judged += 1

    def probs(self, length: int) -> tuple[float, ...]:
        """Probability that the first 1, 2, .. `length` tokens of a draft are all accepted."""
        rate = self.rate
        return tuple(rate ** (i + 1) for i in range(length))

    def hopes(self, length: int) -> tuple[float, ...]:
        """How many tokens of drafts of 1, 2, .. `length` tokens will be accepted."""
        return tuple(accumulate(self.probs(length)))

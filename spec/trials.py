"""How much may be lost on finding out what a source is worth: a small share of the time that went by."""

SHARE = 0.0025  # of the time that may be lost on trials
FIRST = 1.0  # steps that may be lost before any time went by
MOST = 4.0  # steps that may be saved up, or owed


class Trials:
    """An account of time, in steps without any draft. Trials that somebody asked for by name overdraw it."""

    def __init__(self) -> None:
        self.steps = FIRST

    def earn(self) -> None:
        """One more step."""
        self.steps = min(MOST, self.steps + SHARE)

    def may_spend(self, steps: float, must: bool = False) -> bool:
        """Whether a trial that loses so much is affordable, or `must` be; if so, pay for it."""
        if steps > self.steps and not must:
            return False
        self.steps = max(-MOST, self.steps - steps)
        return True

    def settle(self, expected: float, lost: float) -> None:
        """A trial that was to lose `expected` steps has lost `lost`; negative for a gain."""
        self.steps = min(MOST, max(-MOST, self.steps + expected - lost))

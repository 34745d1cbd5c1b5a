"""How much may be lost on finding out what a source is worth: a small share of the time that went by."""

SHARE = 0.01  # of the time that may be lost on trials
FIRST = 2.0  # steps that may be lost before any time went by
MOST = 8.0  # steps that may be saved up, or lost on credit


class Trials:
    """An account of time, in steps without any draft. Trials that somebody asked for may overdraw it."""

    def __init__(self) -> None:
        self.steps = FIRST

    def earn(self) -> None:
        """One more step."""
        self.steps = min(MOST, self.steps + SHARE)

    def may_spend(self, steps: float, must: bool = False) -> bool:
        """Whether a trial that loses so much is affordable, on credit if it `must` be; then it is paid for."""
        if steps > self.steps + (MOST if must else 0.0):
            return False
        self.steps -= steps
        return True

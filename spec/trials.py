"""How much may be lost on finding out what a source is worth: a small share of the time that went by."""

SHARE = 0.005  # of the time that may be lost on trials
FIRST = 1.0  # steps that may be lost before any time went by
MOST = 4.0  # steps that may be saved up, or lost on credit
CHEAP = 0.5  # steps that a trial on credit may lose


class Trials:
    """An account of time, in steps without any draft. Trials that somebody asked for may overdraw it."""

    def __init__(self) -> None:
        self.steps = FIRST

    def earn(self) -> None:
        """One more step."""
        self.steps = min(MOST, self.steps + SHARE)

    def may_spend(self, steps: float, must: bool = False) -> bool:
        """Whether a trial that loses so much is affordable, on credit a cheap one that `must` be; if so, pay for it."""
        on_credit = must and steps <= min(CHEAP, self.steps + MOST)
        if steps > self.steps and not on_credit:
            return False
        self.steps -= steps
        return True

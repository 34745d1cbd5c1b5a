"""How much may be lost on finding out what a source is worth: a small share of the time that went by."""

SHARE = 0.01  # of the time that may be lost on trials
FIRST = 0.1  # seconds that may be lost before any time went by
MOST = 1.0  # seconds that may be saved up, so that a long quiet time does not pay for a long bad one


class Trials:
    """An account of seconds. It may be overdrawn by trials that must be."""

    def __init__(self) -> None:
        self.seconds = FIRST

    def earn(self, seconds: float) -> None:
        """So much time went by."""
        self.seconds = min(MOST, self.seconds + SHARE * seconds)

    def may_spend(self, seconds: float, must: bool = False) -> bool:
        """Whether a trial that loses so much is affordable, or must be; then it is paid for."""
        if not must and seconds > self.seconds:
            return False
        self.seconds -= seconds
        return True

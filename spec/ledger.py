"""What models' drafts really brought, and which models rest because that was too little.

Hopes decide whether a model drafts in a step, and of many hopes that one wins which chance made too high. What came of
it tells in the end. Knows kinds of use (which model, under which load) and time, in steps without any draft.
"""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

_MEMORY = 0.95  # weight of the earlier uses when the next one comes: about the last twenty count
_FEWEST = 8  # uses since the last rest before a kind may rest again
_MOST = 1.0  # steps that a kind may lose between two rests, however few its uses; who saves more is welcome back soon
_UNUSED = 64  # steps without a use before a kind rests
_REST, _LONGEST = 64, 1024  # steps: the first rest, and the longest


@dataclass(slots=True)
class _Account:
    """Of one kind of use."""

    awake_since: int  # step; in the future while it rests
    last_use: int  # step, or when it awoke
    saved: float = 0.0  # steps, on average of the uses since it awoke
    total: float = 0.0  # steps, of all of them
    owed: float = 0.0  # steps that being ready took since the last of them
    num_uses: int = 0
    rest: int = _REST  # steps of the next rest


class Ledger:
    """Learns from what became of every use."""

    def __init__(self) -> None:
        self._now = 0
        self._accounts: defaultdict[Hashable, _Account] = defaultdict(lambda: _Account(self._now, self._now))

    def step(self) -> None:
        """One more step, in which models might draft."""
        self._now += 1

    def rests(self, kind: Hashable) -> bool:
        """Whether it is better to do without in this step."""
        account = self._accounts[kind]
        if self._now - account.last_use > _UNUSED or account.total - account.owed < -_MOST:
            self._put_to_rest(account)
        return self._now < account.awake_since

    def charge(self, kind: Hashable, steps: float) -> None:
        """Being ready to draft took so many steps, whether anything was drafted or not."""
        self._accounts[kind].owed += steps

    def enter(self, kind: Hashable, saved: float) -> None:
        """Drafts of a kind saved so many steps, all that they took subtracted; negative for a loss."""
        account = self._accounts[kind]
        account.last_use = self._now
        account.num_uses += 1
        saved, account.owed = saved - account.owed, 0.0
        account.total += saved
        account.saved += max(1.0 / account.num_uses, 1.0 - _MEMORY) * (saved - account.saved)
        if account.total < -_MOST or (account.num_uses >= _FEWEST and account.saved < 0.0):
            self._put_to_rest(account)
        elif account.total > _MOST:
            account.rest = _REST

    def _put_to_rest(self, account: _Account) -> None:
        account.awake_since = account.last_use = self._now + account.rest
        account.rest = min(_LONGEST, 2 * account.rest)
        account.saved, account.total, account.owed, account.num_uses = 0.0, 0.0, 0.0, 0

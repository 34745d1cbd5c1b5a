"""The pass behind one that is under way, planned before anybody knows what that one finds.

A pass without drafts brings each sequence just one token, so all but that token is known beforehand: positions, slots,
noise. The device takes the token from the pass before, and nothing waits for the host in between.
"""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

from verdraft.scheduler.drafting import Drafting
from verdraft.scheduler.passed import generates
from verdraft.scheduler.passes import Flight
from verdraft.scheduler.plan import UNKNOWN, Work
from verdraft.scheduler.scheduler import Scheduler
from verdraft.scheduler.sequence import Sequence
from verdraft.scheduler.verifier import Failed, Verified
from verdraft.spec.constraint import UNCONSTRAINED
from verdraft.spec.patience import Patience


class Lookahead:
    """Says when a pass may be begun behind another, and when that is better than to wait and to draft."""

    def __init__(self, scheduler: Scheduler, drafting: Drafting) -> None:
        self._scheduler, self._drafting = scheduler, drafting
        self._patience = Patience()

    def waits(self) -> bool:
        """Whether the next step needs to know what the pass under way will find."""
        running = self._scheduler.running
        if not all(seq.is_foreseeable for seq in running):
            return True
        drafting = [seq for seq in running if seq.drafts]
        if not drafting:
            return False
        asked_for = any(seq.request.prediction for seq in drafting) or not self._drafting.judges(drafting)
        return asked_for or self._patience.waits(len(running))

    def learn(self, flight: Flight, results: Seq[Verified | Failed]) -> None:
        """What a pass has brought. One whose sequences have all ended may have waited long for the next request."""
        if not results:
            self._patience.pause()
            return
        tokens = sum(len(result.tokens) for result in results if isinstance(result, Verified))
        self._patience.learn(len(flight.plan), not flight.is_ahead, tokens, time.perf_counter())

    def pause(self) -> None:
        """Nothing is under way."""
        self._patience.pause()


def is_foreseeable(seq: Sequence) -> bool:
    """Whether the device finds a token of this sequence while the host does not know the one before."""
    blind = not seq.request.params.uses_history and seq.request.constraint is UNCONSTRAINED
    return blind and not seq.request.fault and generates(seq)


def brings_one_token(plan: Seq[Work]) -> bool:
    """Whether a pass over foreseeable sequences brings each of them one token, or none."""
    return not any(work.draft.tokens or work.seq.computed[0] != work.seq.computed[-1] for work in plan)


@contextmanager
def as_if_committed(plan: Seq[Work]) -> Iterator[None]:
    """The sequences of a foreseeable plan as they will be when its pass has ended, if they go on."""
    works = [work for work in plan if not work.seq.finished]
    yielding = [work.seq for work in works if work.yields]
    for work in works:
        work.seq.settle(work.end)
    for seq in yielding:
        seq.tokens.append(UNKNOWN)
    try:
        yield
    finally:
        for seq in yielding:
            seq.tokens.pop()
        for work in works:
            work.seq.settle(work.start)

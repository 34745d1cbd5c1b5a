"""Passes from a plan to what they mean: begun, waited for, verified; what fails takes nobody else with it."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from verdraft.kernels.sampling import AllTokensMasked, BadLogits
from verdraft.scheduler.blocks import BlockPool
from verdraft.scheduler.counters import Totals
from verdraft.scheduler.drafting import Drafting
from verdraft.scheduler.faults import inject_before, inject_nan
from verdraft.scheduler.passed import Passed
from verdraft.scheduler.plan import Work
from verdraft.scheduler.runner import Begun, Runner
from verdraft.scheduler.sequence import Sequence
from verdraft.scheduler.verifier import Failed, Verified, Verifier
from verdraft.spec.constraint import ConstraintFailed

logger = logging.getLogger("verdraft.engine")


@dataclass(slots=True)
class Flight:
    """A pass that is under way. `read` waits for its end, and raises what went wrong, now or at its beginning.

    `begun` is what the device has of it; `failed`: what it found was not what the host took it for.
    """

    plan: list[Work]
    read: Callable[[], Passed]
    begun: Begun | None = None
    is_ahead: bool = False  # begun before the one before it had ended
    failed: bool = False


@dataclass(slots=True)
class Passes:
    """Executes plans; changes no sequence, but for what is computed of one that came upon NaN."""

    runner: Runner
    verifier: Verifier
    drafting: Drafting
    totals: Totals
    pool: BlockPool
    passed_at: float = 0.0  # time.monotonic() seconds, when the last of them ended

    def begin(self, plan: list[Work], behind: Flight | None = None) -> Flight:
        """Until `end`, sequences may end but not be preempted. `behind`: a pass under way, whose tokens this one takes
        where the plan does not know them."""
        try:
            inject_before(plan)
            self.totals.iteration_tokens += sum(work.num_tokens for work in plan)
            begun, read = self.runner.start(plan, behind.begun if behind else None)
            return Flight(plan, read, begun, is_ahead=behind is not None)
        except Exception as error:
            return Flight(plan, partial(_fail, error))

    def end(self, flight: Flight) -> list[Verified | Failed]:
        """What came of the pass. When it failed, run each work alone, so that only the one at fault is lost: by the law
        the others get the same tokens as together."""
        plan = flight.plan
        try:
            return list(self._verified(flight))
        except Exception as error:
            flight.failed = True
            left = [work for work in plan if not work.seq.finished]
            if len(plan) == 1:
                return [Failed(work, self._blame(work.seq, error)) for work in left]
        return [result for work in left for result in self.end(self.begin([work]))]

    def drop(self, flight: Flight) -> None:
        """Wait for a pass of which nothing counts."""
        with suppress(Exception):
            flight.read()

    def _verified(self, flight: Flight) -> list[Verified]:
        passed = flight.read()
        self.passed_at = time.monotonic()
        inject_nan(flight.plan, passed)
        results = self.verifier.verify(flight.plan, passed)
        self.runner.straighten(results)
        self.drafting.watch(results, passed.taps)
        return results

    def _blame(self, seq: Sequence, error: Exception) -> str:
        bans_all = isinstance(error, AllTokensMasked) or self._bans_all(seq)
        if isinstance(error, BadLogits) and not bans_all:
            self.totals.corrupted += 1
            self.pool.forget(seq.blocks)
            seq.settle(0)
        logger.error("request %s failed in a step", seq.request.id, exc_info=error)
        return "invalid_value" if bans_all or isinstance(error, ConstraintFailed) else "internal_error"

    def _bans_all(self, seq: Sequence) -> bool:
        """A device does not say why it has found no token."""
        return len(self.verifier.law.banned(seq, 0) or ()) == self.runner.model.config.vocab_size


def _fail(error: Exception) -> Passed:
    raise error

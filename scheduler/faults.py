"""Faults on request, to prove that one request's failure stays its own (HTTP contract, section 12).

Requests carry a fault only when the server was started with test hooks; otherwise nothing here ever fires.
"""

import time

import numpy as np

from verdraft.kernels.draws import BAD
from verdraft.scheduler.passed import Passed
from verdraft.scheduler.plan import Work


class InjectedFault(RuntimeError):
    """Raised inside a step on request."""


def _due(work: Work, kind: str) -> bool:
    fault, seq = work.seq.request.fault, work.seq
    return fault is not None and fault.kind == kind and not seq.fault_fired and seq.num_output >= fault.after_tokens


def inject_before(plan: list[Work]) -> None:
    """`freeze` blocks once; `raise` raises every time, so that the retry alone fails too."""
    faulty = [work for work in plan if work.seq.request.fault]
    for work in faulty:
        if _due(work, "freeze") and work.seq.request.fault:
            work.seq.fault_fired = True
            time.sleep(work.seq.request.fault.seconds)
    if any(_due(work, "raise") for work in faulty):
        raise InjectedFault("injected by a test hook")


def inject_nan(plan: list[Work], passed: Passed) -> None:
    """Turn a due request's logits into NaN, or what the device had found into what it makes of them."""
    for work, (rows, told) in zip(plan, passed.spans, strict=True):
        if work.seq.request.fault and _due(work, "nan"):
            if passed.drawn:
                passed.tokens[rows], passed.prompt_scores[told] = BAD, np.nan
            else:
                passed.logits[rows] = np.nan


def wants_preemption(work: Work) -> bool:
    """True once for a request that asked to be preempted."""
    if _due(work, "preempt"):
        work.seq.fault_fired = True
        return True
    return False

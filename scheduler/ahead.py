"""The pass behind one that is under way, planned before anybody knows what that one finds.

A pass without drafts brings each sequence just one token, so all but that token is known beforehand: positions, slots,
noise. The device takes the token from the pass before, and nothing waits for the host in between.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

from verdraft.scheduler.passed import can_be_drawn, generates
from verdraft.scheduler.plan import UNKNOWN, Work
from verdraft.scheduler.sequence import Sequence
from verdraft.spec.constraint import UNCONSTRAINED


def foreseeable(plan: Seq[Work]) -> bool:
    """Whether all that this pass can change is known but for the tokens, and the device finds those."""
    return all(_leaves_one_token(work) for work in plan)


def _leaves_one_token(work: Work) -> bool:
    seq = work.seq
    unforeseen = work.draft.tokens or seq.request.fault or seq.computed[0] != seq.computed[-1]
    return not unforeseen and (not work.yields or _is_drawn(seq))


def _is_drawn(seq: Sequence) -> bool:
    """Whether the device finds its tokens, without knowing the one before."""
    blind = not seq.request.params.uses_history and seq.request.constraint is UNCONSTRAINED
    return blind and generates(seq) and can_be_drawn(seq)


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

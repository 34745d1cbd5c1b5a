"""What a model's drafts of one step took and brought, beside what their sequences would have verified without it."""

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from verdraft.scheduler.sequence import Sequence
from verdraft.scheduler.verifier import Verified
from verdraft.spec.draft import Draft
from verdraft.spec.ledger import Ledger
from verdraft.spec.router import Arm, Plan
from verdraft.spec.spending import Costs
from verdraft.spec.trials import Trials


@dataclass(frozen=True, slots=True)
class Use:
    """One arm drafted for the sequences with these numbers, which took `seconds`."""

    arm: Arm
    chosen: Seq[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Without:
    """What the step would be without models: the free drafts, and the plan for them."""

    free: Seq[Draft]
    plan: Plan

    @property
    def probs(self) -> list[tuple[float, ...]]:
        """The chances of every free draft."""
        return [draft.probs for draft in self.free]

    def hoped(self, i: int) -> float:
        """Tokens that sequence i's free draft would bring."""
        return sum(self.free[i].probs[: self.plan.routes[i].length])


@dataclass(slots=True)
class _Bet:
    """A use of which `num_open` sequences are not verified yet."""

    kind: Hashable
    seconds: float  # that the step takes longer
    tokens: float  # accepted so far, less those that free drafts were expected to bring
    rate: float  # tokens a second without the model
    unit: float  # seconds of a step without any draft
    price: float | None  # of a trial: the steps that it was to lose, which are paid
    num_open: int


def kind_of(arm: str, load: int) -> Hashable:
    """How a use of an arm is booked where so many sequences decode."""
    return arm, load.bit_length()


class Bets:
    """Settles every use when it is verified: with the ledger, or, of a trial, with the account of trials."""

    def __init__(self, ledger: Ledger, trials: Trials) -> None:
        self._ledger = ledger
        self._trials = trials
        self._open: dict[int, _Bet] = {}  # by sequence
        self._paid: dict[str, float] = {}  # steps that this step's trials are to lose, by arm

    def forget(self) -> None:
        """A new step: what is still open is never verified."""
        self._open.clear()
        self._paid.clear()

    def may_try(self, arm: Arm, steps: float, must: bool) -> bool:
        """Whether a trial that is to lose so many steps is affordable, or `must` be; if so, it is paid for."""
        if not self._trials.may_spend(steps, must):
            return False
        self._paid[arm.name] = steps
        return True

    def place(self, use: Use, decoding: Seq[Sequence], without: Without, costs: Costs) -> None:
        """What these sequences verify now, they owe to this use."""
        drafted = sum(len(decoding[i].draft.tokens) for i in use.chosen)
        rows = len(decoding) + sum(len(seq.draft.tokens) for seq in decoding)
        instead = sum(without.plan.routes[i].length for i in use.chosen)
        more = costs.of(rows) - costs.of(rows - drafted + instead) - use.arm.saved(drafted, rows)
        bet = _Bet(
            kind=kind_of(use.arm.name, len(decoding)),
            seconds=use.seconds + more,
            tokens=-sum(map(without.hoped, use.chosen)),
            rate=without.plan.outlook.rate(costs),
            unit=costs.of(len(decoding)),
            price=self._paid.get(use.arm.name),
            num_open=len(use.chosen),
        )
        self._open |= {decoding[i].order: bet for i in use.chosen}

    def learn(self, verified: Verified) -> None:
        """What the full model says of one of the drafts."""
        bet = self._open.pop(verified.work.seq.order, None)
        if bet is None:
            return
        bet.tokens += len(verified.tokens) - 1
        bet.num_open -= 1
        if bet.num_open == 0:
            self._settle(bet, (bet.tokens / bet.rate - bet.seconds) / bet.unit)

    def _settle(self, bet: _Bet, saved: float) -> None:
        if bet.price is None:
            self._ledger.enter(bet.kind, saved)
        else:
            self._trials.settle(bet.price, -saved)

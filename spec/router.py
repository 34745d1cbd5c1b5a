"""Who drafts how in one step: of every sequence which source, and how many tokens (DESIGN section 6).

Knows probabilities and seconds. A sequence may have a free draft, whose tokens are known and cost only their
verification, and models may draft for it, which takes time that all sequences share for which the model drafts in
lockstep. What is wanted is the most tokens a second over all sequences that decode together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from verdraft.spec.spending import Costs, spend

MARGIN = 1.03  # a model's drafts must promise so much more than doing without: hopes and times are never quite right
TAU = 6.0  # accepted tokens above which HVD verifies the suffix draft (PAPERS 1.1)


@dataclass(frozen=True, slots=True)
class Arm:
    """One model's offer to draft in this step.

    `hopes` by sequence: how many tokens of drafts of 1, 2, .. tokens (trees: levels) will be accepted, on average.
    `seconds(count, length, rows)`: what drafting `length` tokens for `count` sequences takes, less what it saves the
    pass over `rows` tokens that follows. `rows_at`: tokens to verify at every length, on average; empty for as many.
    `saved(drafted, rows)`: of that, what `drafted` of its tokens save the pass.
    `unknown` and `unseen` are sequences for which its drafts were judged too seldom yet, or were never made though it
    was asked for.
    """

    name: str
    hopes: Mapping[int, Sequence[float]]
    seconds: Callable[[int, int, float], float]
    rows_at: Mapping[int, Sequence[float]] = field(default_factory=dict)
    unknown: Sequence[int] = ()
    unseen: Sequence[int] = ()
    saved: Callable[[int, int], float] = lambda drafted, rows: 0.0

    @property
    def longest(self) -> int:
        """Tokens (levels) of the longest draft offered."""
        return max(map(len, self.hopes.values()), default=0)

    def length(self, i: int, length: int) -> int:
        """As long as sequence i's draft may be, and no longer than `length`."""
        return min(length, len(self.hopes[i]))

    def rows(self, i: int, length: int) -> float:
        """Tokens to verify of such a draft."""
        length = self.length(i, length)
        return self.rows_at[i][length - 1] if self.rows_at and length else length

    def expected(self, i: int, length: int) -> float:
        """Tokens of such a draft that will be accepted."""
        length = self.length(i, length)
        return self.hopes[i][length - 1] if length else 0.0


class Route(NamedTuple):
    """What one sequence verifies: so many tokens of its free draft, or of what the arm of this name drafts for it."""

    arm: str | None
    length: int


_NOTHING = Route(None, 0)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a step is expected to yield: tokens of all sequences, by a pass over so many rows, after so many seconds of
    drafting."""

    tokens: float
    rows: float
    drafting: float = 0.0

    def seconds(self, costs: Costs) -> float:
        """Of the whole step."""
        return max(costs.of(self.rows) + self.drafting, 1e-9)

    def rate(self, costs: Costs) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds(costs)


@dataclass(frozen=True, slots=True)
class Plan:
    """A route for each sequence, and what they come to together."""

    routes: tuple[Route, ...]
    outlook: Outlook
    trials: tuple[int, ...] = ()  # sequences that draft only so that something is learned


def free_plan(free: Sequence[Sequence[float]], costs: Costs) -> Plan:
    """Free drafts alone, each as long as pays. free[i][j] is the chance that draft i is accepted beyond token j."""
    if not any(free):
        return Plan((_NOTHING,) * len(free), Outlook(len(free), len(free)))
    lengths = spend(free, len(free), costs)
    tokens = len(free) + sum(sum(probs[:n]) for probs, n in zip(free, lengths, strict=True))
    return Plan(tuple(Route(None, n) for n in lengths), Outlook(tokens, len(free) + sum(lengths)))


def payoff(free: Sequence[Sequence[float]], arms: Sequence[Arm], costs: Costs) -> Plan:
    """The most tokens a second: free drafts as long as pays, and then what models add."""
    return with_models(free_plan(free, costs), free, arms, costs)


def with_models(plan: Plan, free: Sequence[Sequence[float]], arms: Sequence[Arm], costs: Costs) -> Plan:
    """`plan` and, model by model, the use that adds most to its rate, until none adds anything."""
    rest = list(arms)
    while rest:
        offers = [(rate, arm, chosen, length) for arm in rest for rate, chosen, length in _uses(plan, arm, free, costs)]
        best = max(offers, key=itemgetter(0), default=None)
        if best is None or best[0] <= MARGIN * plan.outlook.rate(costs):
            break
        _, arm, chosen, length = best
        plan = use(plan, arm, chosen, length, free)
        rest.remove(arm)
    return plan


def by_score(free: Sequence[Sequence[float]], scores: Sequence[float], tau: float, arms: Sequence[Arm]) -> Plan:
    """HVD (PAPERS 1.1): the whole free draft where its score is above `tau`, else the first model that offers a draft,
    at full length. One source a step and no weighing: `plan.outlook` leaves out what drafting takes."""
    routes = tuple(_first_choice(i, free[i], score > tau, arms) for i, score in enumerate(scores))
    return Plan(routes, Outlook(float(len(free)), len(free) + sum(route.length for route in routes)))


def use(plan: Plan, arm: Arm, chosen: Sequence[int], length: int, free: Sequence[Sequence[float]]) -> Plan:
    """`plan` with drafts of `length` tokens by the arm for these sequences instead of what they had."""
    routes = list(plan.routes)
    tokens, rows = plan.outlook.tokens, plan.outlook.rows
    for i in chosen:
        tokens += arm.expected(i, length) - sum(free[i][: routes[i].length])
        rows += arm.rows(i, length) - routes[i].length
        routes[i] = Route(arm.name, arm.length(i, length))
    drafting = plan.outlook.drafting + arm.seconds(len(chosen), length, rows)
    return Plan(tuple(routes), Outlook(tokens, rows, drafting), plan.trials)


def loss(plan: Plan, other: Plan, costs: Costs) -> float:
    """How much longer a step by `other` takes for its tokens than at the rate of `plan`, in steps without any draft;
    negative for a gain."""
    seconds = other.outlook.seconds(costs) - other.outlook.tokens / plan.outlook.rate(costs)
    return seconds / max(costs.of(len(plan.routes)), 1e-9)


def _uses(
    plan: Plan, arm: Arm, free: Sequence[Sequence[float]], costs: Costs
) -> Iterator[tuple[float, Sequence[int], int]]:
    """Every length, for the sequence that gains most, the best two, four, .. and all: the rate in tokens a second, the
    sequences, the length. Who has another model's draft keeps it."""
    kept = {i: sum(free[i][: plan.routes[i].length]) for i in arm.hopes if plan.routes[i].arm is None}
    longest = arm.longest
    order = sorted(kept, key=lambda i: kept[i] - arm.expected(i, longest))
    for length in range(1, longest + 1):
        tokens, rows, goal = plan.outlook.tokens, plan.outlook.rows, 1
        for count, i in enumerate(order, 1):
            tokens += arm.expected(i, length) - kept[i]
            rows += arm.rows(i, length) - plan.routes[i].length
            if count in (goal, len(order)):
                goal = 2 * count
                drafting = plan.outlook.drafting + arm.seconds(count, length, rows)
                yield tokens / max(costs.of(rows) + drafting, 1e-9), order[:count], length


def _first_choice(i: int, free: Sequence[float], trusted: bool, arms: Sequence[Arm]) -> Route:
    offers = (arm for arm in arms if arm.hopes.get(i))
    arm = None if trusted else next(offers, None)
    if arm is None:
        return Route(None, len(free) if trusted else 0)
    return Route(arm.name, len(arm.hopes[i]))

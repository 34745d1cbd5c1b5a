"""Routers on replayed answers: which source each cycle verifies, and what came of it. No model runs.

The suffix source's drafts and labels are those of a replay (spec/replay.py); the model drafter is a chain whose tokens
are right with given chances, drawn once for every position, so that all routers see the same drafts. What phi says of
the recent past follows the router's own choices.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verdraft.spec.features import FEATURES, HISTORY, Floats, RecentHistory, history_features
from verdraft.spec.predictor import PayoffPredictor, path_probs
from verdraft.spec.replay import States
from verdraft.spec.spending import CostTable

SCORE = FEATURES.index("score")


class Route(NamedTuple):
    """What a cycle verifies: tokens of the suffix draft, or of the model drafter's."""

    suffix: int = 0
    model: int = 0


@dataclass(frozen=True, slots=True)
class Cycle:
    """What a router may look at: the suffix draft (drafted 0: there is none), its phi; and, for the oracle alone, how
    much of each draft is right."""

    drafted: int
    features: Floats  # [1, F]
    right: int
    model_right: int


Router = Callable[[Cycle], Route]


@dataclass(frozen=True, slots=True)
class Machine:
    """What cycles cost and what the model drafter brings. `passes`: seconds by rows of a full pass, which as many as
    `streams` sequences share evenly."""

    passes: CostTable
    model_token: float  # seconds to draft a token with the model drafter
    survival: tuple[float, ...]  # P(its first l tokens are right), l = 1 .. its longest chain
    streams: int = 1

    def seconds(self, route: Route) -> float:
        """Of one cycle of one sequence, if all verify as many tokens."""
        rows = self.streams * (1 + route.suffix + route.model)
        return self.passes.of(rows) / self.streams + route.model * self.model_token


def suffix_only(cycle: Cycle) -> Route:
    """SuffixDecoding: every draft, whole."""
    return Route(suffix=cycle.drafted)


def model_only(machine: Machine) -> Router:
    """EAGLE3 alone, at full length."""
    return lambda cycle: Route(model=len(machine.survival))


def score_threshold(machine: Machine, tau: float) -> Router:
    """The rule-based hybrid: the suffix draft where its score reaches `tau`, else the model's."""
    whole = len(machine.survival)
    return lambda c: Route(c.drafted) if c.drafted and c.features[0, SCORE] >= tau else Route(model=whole)


def hvd(machine: Machine, predictor: PayoffPredictor, tau: float) -> Router:
    """HVD: the suffix draft where its predicted accepted length is above `tau`, else the model's."""

    def route(cycle: Cycle) -> Route:
        if cycle.drafted and predictor.predict(cycle.features).mean[0] > tau:
            return Route(cycle.drafted)
        return Route(model=len(machine.survival))

    return route


def payoff(machine: Machine, predictor: PayoffPredictor) -> Router:
    """The source and the length with the most expected tokens a second; nothing, if that is best."""
    models = _rated(machine, machine.survival, model=True)

    def route(cycle: Cycle) -> Route:
        if not cycle.drafted:
            return max(models)[1]
        survival = predictor.predict(cycle.features).survival[0]
        return max(max(models), max(_rated(machine, path_probs(survival, cycle.drafted), model=False)))[1]

    return route


def _rated(machine: Machine, survival: Sequence[float], model: bool) -> list[tuple[float, Route]]:
    """Every length and its tokens a second."""
    tokens = np.cumsum([1.0, *survival]).tolist()
    routes = [Route(model=n) if model else Route(suffix=n) for n in range(len(tokens))]
    return [(gained / machine.seconds(route), route) for gained, route in zip(tokens, routes, strict=True)]


def oracle(machine: Machine) -> Router:
    """Knows what is right, and verifies just that much of the better source."""

    def route(cycle: Cycle) -> Route:
        routes = (Route(), Route(suffix=cycle.right), Route(model=cycle.model_right))
        return max(routes, key=lambda route: (1 + sum(route)) / machine.seconds(route))

    return route


@dataclass(slots=True)
class Outcome:
    """Sums over all cycles of a router on one workload."""

    cycles: int = 0
    tokens: int = 0
    suffix_cycles: int = 0
    drafted: int = 0
    seconds: float = 0.0

    def add(self, route: Route, tokens: int, seconds: float) -> None:
        """One cycle, which committed `tokens`."""
        self.cycles += 1
        self.tokens += tokens
        self.suffix_cycles += route.suffix > 0
        self.drafted += sum(route)
        self.seconds += seconds

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def cycles_per_1000(self) -> float:
        """Full passes for 1,000 tokens."""
        return 1000 * self.cycles / max(1, self.tokens)


@dataclass(slots=True)
class _Past:
    """The recent history along a walk: drafts are judged once the committed text has decided them."""

    history: RecentHistory = field(default_factory=RecentHistory)
    open: list[tuple[int, int, int]] = field(default_factory=list)  # position, drafted, right

    def advance(self, position: int) -> None:
        """Everything before `position` is committed."""
        decided = [entry for entry in self.open if entry[0] + entry[2] + (entry[2] < entry[1]) <= position]
        for entry in decided:
            self.history.judge(entry[1], entry[2])
            self.open.remove(entry)


def walk(states: States, machine: Machine, router: Router, kept: Sequence[int], seed: int = 0) -> Outcome:
    """The answers with the numbers `kept`, each from its first decoded token to its end."""
    outcome = Outcome()
    starts = np.searchsorted(states.answer, np.arange(len(states.answers) + 1))
    for number in kept:
        rows = {int(states.position[i]): i for i in range(starts[number], starts[number + 1])}
        length = int(states.lengths[number])
        model_right = _draws(machine, length, np.random.default_rng([seed, number]))
        for route, tokens in _cycles(states, router, rows, length, model_right):
            outcome.add(route, tokens, machine.seconds(route))
    return outcome


def _cycles(
    states: States, router: Router, rows: dict[int, int], length: int, model_right: NDArray[np.int64]
) -> Iterator[tuple[Route, int]]:
    past, position = _Past(), 1
    while position < length:
        cycle = _cycle(states, rows.get(position), int(model_right[position]), past.history)
        route = router(cycle)
        past.history.cycle(route.suffix > 0)
        if cycle.drafted:
            past.open.append((position, cycle.drafted, cycle.right))
        accepted = min(route.suffix, cycle.right) + min(route.model, cycle.model_right)
        tokens = min(1 + accepted, length - position)
        yield route, tokens
        position += tokens
        past.advance(position)


def _cycle(states: States, row: int | None, model_right: int, history: RecentHistory) -> Cycle:
    if row is None:
        return Cycle(0, states.features[:0], 0, model_right)
    features = states.features[row : row + 1].copy()
    features[0, HISTORY] = history_features(history)
    return Cycle(int(states.drafted[row]), features, int(states.accepted[row]), model_right)


def _draws(machine: Machine, length: int, rng: np.random.Generator) -> NDArray[np.int64]:  # [length]
    """How many tokens of the model's draft are right at every position."""
    right: NDArray[np.int64] = (rng.random((length, 1)) < np.array(machine.survival)).sum(1)
    return right

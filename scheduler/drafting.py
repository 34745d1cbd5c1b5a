"""The first part of a step: every decoding sequence gets a draft, from the source and of the length that pay best."""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from verdraft.scheduler.bets import Bets, Use, Without, kind_of
from verdraft.scheduler.eagle import EagleDrafter
from verdraft.scheduler.estimates import Estimates
from verdraft.scheduler.exits import ExitDrafter
from verdraft.scheduler.request import Mode, Request
from verdraft.scheduler.scheduler import Scheduler
from verdraft.scheduler.sequence import Sequence
from verdraft.scheduler.verifier import Verified
from verdraft.spec.asking import Asking
from verdraft.spec.draft import ASK, EMPTY, Draft, Drafter
from verdraft.spec.host_time import HostTime
from verdraft.spec.ledger import Ledger
from verdraft.spec.router import TAU, Arm, Plan, by_score, free_plan, loss, use, with_models
from verdraft.spec.sources import make_drafter
from verdraft.spec.spending import FREE, Costs, CostTable, Reading, spend
from verdraft.spec.suffix import SuffixStores
from verdraft.spec.trials import Trials

REST = 7  # steps for which models are not asked again after they had no offer that pays


@dataclass(slots=True)
class Asked:
    """A free source was asked for one sequence: the kind of asking, and how long it took."""

    kind: tuple[int, int]
    seconds: float


class ModelDrafter(Protocol):
    """A model, or a part of the target, that drafts for several sequences in lockstep."""

    def measure(self, full: CostTable) -> None:
        """Learn what drafting costs here; `full` are whole passes of the target."""
        ...

    def prepare(self, seq: Sequence, mode: Mode) -> None:
        """Say whether and how the model may draft for a new sequence of this mode."""
        ...

    def arms(self, decoding: list[Sequence], rooms: Seq[int], full: Costs) -> list[Arm]:
        """What it offers in this step, whose pass costs `full`: drafts of at most rooms[i] tokens. Not called while
        models rest."""
        ...

    def draft(self, arm: str, seqs: list[Sequence], lengths: list[int]) -> list[Draft]:
        """Draft for these sequences as this arm offered, lengths[i] > 0 tokens or levels at most."""
        ...

    def learn(self, verified: Verified) -> None:
        """What the full model says of a draft; before it is committed."""
        ...


@dataclass(frozen=True, slots=True)
class Decoding:
    """A step in which sequences only decode and no model drafts."""

    began: float
    orders: frozenset[int]  # of the sequences
    expected: float  # seconds of its pass


@dataclass(frozen=True, slots=True)
class Offer:
    """An arm and whose it is."""

    model: ModelDrafter
    arm: Arm


class Drafting:
    """Knows the server's draft sources and what a pass costs; sets `seq.draft` of running sequences."""

    def __init__(self, scheduler: Scheduler, exits: ExitDrafter, eagle: EagleDrafter | None, trials: Trials) -> None:
        self.costs = FREE
        self.reading = Reading()
        self._now: Costs = FREE  # costs of this step's pass
        self.exits = exits
        self.eagle = eagle
        models: tuple[ModelDrafter, ...] = (*((eagle,) if eagle else ()), *((exits,) if exits.modes else ()))
        self.models = models  # preferred ones first
        self._arms: tuple[Mode, ...] = (*exits.modes, *(eagle.modes if eagle else ()))
        self.stores = SuffixStores(scheduler.config.suffix_store_tokens)
        self.estimates = Estimates()
        self.asking = Asking()
        self._trials = trials
        self._ledger = Ledger()
        self._bets = Bets(self._ledger, trials)
        self._host = HostTime()
        self._last: Decoding | None = None  # the step before, if it was one
        self._awake: list[Mode] = []  # arms that are ready to draft and judged by what that brings
        self._load = 0  # sequences that decode in this step
        self._rest, self._rested_with = 0, 0  # steps in which models are not asked, while so many sequences decode
        self._scheduler = scheduler
        self._config = scheduler.config

    @property
    def modes(self) -> tuple[Mode, ...]:
        """What a request's `speculation` may ask for."""
        return ("auto", "off", "suffix", *self._arms, "hybrid")

    def measure(self, full: CostTable) -> None:
        """Learn what each source costs here; `full` are whole passes."""
        self.costs = full
        for model in self.models:
            model.measure(full)

    def mode(self, request: Request) -> Mode:
        """What the request's `speculation` means here; never "auto"."""
        return self._config.speculation if request.speculation == "auto" else request.speculation

    def drafter(self, request: Request) -> Drafter:
        """The free sources of a new sequence: those that need no pass over any layer. A prediction is tried unless the
        request itself says "off"."""
        mode = self.mode(request)
        prediction = request.prediction if request.speculation != "off" else ()
        assert mode != "auto", "the configuration says what that means"
        # The smallest index that the source allows, for models of a very short context.
        remembered = max(32, self._config.max_model_len)
        store = self.stores.of(request.cache_salt) if mode in ("suffix", "hybrid") else None
        return make_drafter(mode, prediction, store, remembered, request.constraint)

    def prepare(self, seq: Sequence) -> None:
        """Say which models may draft for a new sequence."""
        for model in self.models:
            model.prepare(seq, self.mode(seq.request))

    # ---- a step

    def draft(self) -> None:
        """Give every decoding sequence a draft: nobody's, a free source's or a model's, as long as pays."""
        running, began = self._scheduler.running, time.perf_counter()
        decoding = [seq for seq in running if seq.decoding]
        load = len(decoding)
        self._learn_host(decoding, began)
        for seq in decoding:
            seq.roll_back(seq.computed[-1])  # from a draft for which the last step had no room
        self._now = self.reading.costs(self.costs, [len(seq.tokens) for seq in decoding], self._host.of(load))
        self._trials.earn()
        uses_model = any(seq.drafts for seq in decoding) and self._draft(decoding)
        if load == len(running) and not uses_model and self.costs.of(1) > 0.0:
            expected = self._now.of(load + sum(len(seq.draft.tokens) for seq in decoding)) - self._host.of(load)
            self._last = Decoding(began, frozenset(seq.order for seq in decoding), expected)

    def _draft(self, decoding: list[Sequence]) -> bool:
        """Whether a model drafts."""
        rooms = self._rooms(decoding)
        asked: dict[int, Asked] = {}
        proposed = [
            EMPTY if seq.drafter.is_silent else self._ask(i, seq, rooms[i], len(decoding), asked)
            for i, seq in enumerate(decoding)
        ]
        free, means = self._judge(decoding, proposed, asked)
        without = Without(free, free_plan([draft.probs for draft in free], self._now))
        asked_at = time.perf_counter()
        offers = self._offers(decoding, rooms, free)
        plan = self._plan(decoding, without, means, [offer.arm for offer in offers])
        self._charge(self._awake, time.perf_counter() - asked_at)
        if any(offer.arm.hopes for offer in offers) and self._config.router == "payoff" and not _uses_model(plan):
            self._rest = REST
        self._learn_asking(asked, free, plan)
        for seq, draft, route in zip(decoding, free, plan.routes, strict=True):
            is_own = draft.tokens and route.arm is None
            seq.draft = draft.trim(max(route.length, draft.least)) if is_own else EMPTY
            seq.hindsight.history.cycle(bool(seq.draft.tokens) and draft.source == "suffix")
        if _uses_model(plan):
            self._let_draft(offers, decoding, plan, without)
        self.exits.prune(decoding)
        return _uses_model(plan)

    def _rooms(self, decoding: list[Sequence]) -> list[int]:
        """Tokens that each one's draft may have."""
        budget = self._config.max_batch_tokens
        if len(decoding) < len(self._scheduler.running):
            budget //= 2  # the other half is for those that are still prefilled
        share = budget // len(decoding) - 1
        # The pass itself yields one token, so a draft needs at most one less than what may still come.
        return [max(0, min(share, seq.max_len - len(seq.tokens) - 1)) for seq in decoding]

    def skip(self) -> None:
        """Give nobody a draft, and take none back."""
        self._last = None
        for seq in self._scheduler.running:
            seq.roll_back(seq.computed[-1])
            seq.draft = EMPTY

    def _learn_host(self, decoding: list[Sequence], now: float) -> None:
        """What the step before took beside its pass, unless prompts were in it."""
        last, self._last = self._last, None
        if last and decoding and last.orders.issuperset(seq.order for seq in self._scheduler.running):
            self._host.learn(len(last.orders), last.expected, now - last.began)

    def _offers(self, decoding: list[Sequence], rooms: Seq[int], free: Seq[Draft]) -> list[Offer]:
        """What models offer; where nothing of it paid a moment ago, they are not asked in every step, and those that
        brought too little for long are left alone for long."""
        self._bets.forget()
        self._load = len(decoding)
        if not any(seq.eagle or seq.exits for seq in decoding):
            return []
        self._ledger.step()
        if self._rest and len(decoding) == self._rested_with:
            self._rest -= 1
            return []
        self._rest, self._rested_with = 0, len(decoding)
        resting = self._resting(decoding)
        if self.eagle:
            self.eagle.follow(self._scheduler.running, "eagle" not in resting)
        self._awake = [arm for arm in self._arms if arm not in resting] if self.judges(decoding) else []
        if len(resting) == len(self._arms):
            self._rest = REST
            return []
        arms = ((model, arm) for model in self.models for arm in model.arms(decoding, rooms, self._now))
        return [Offer(model, _without_predictions(arm, free)) for model, arm in arms if arm.name not in resting]

    def _resting(self, decoding: list[Sequence]) -> set[str]:
        """Arms to do without."""
        if not self.judges(decoding):
            return set()
        return {arm for arm in self._arms if self._ledger.rests(kind_of(arm, len(decoding)))}

    def judges(self, decoding: list[Sequence]) -> bool:
        """Whether what drafts bring decides if there are any: not where a request asks for some by name, or where costs
        were not measured."""
        named = any(self.mode(seq.request) not in ("off", "suffix", "hybrid") for seq in decoding)
        return not named and self._config.router == "payoff" and self.costs.of(1) > 0.0

    def _charge(self, arms: Seq[str], seconds: float) -> None:
        """Being ready to draft took these arms so long together."""
        for arm in arms:
            self._ledger.charge(kind_of(arm, self._load), seconds / len(arms) / self.costs.of(self._load))

    def _let_draft(self, offers: Seq[Offer], decoding: Seq[Sequence], plan: Plan, without: Without) -> None:
        """Models draft as planned; what they are sure of only then, may be less than pays to verify."""
        uses = [use for offer in offers if (use := self._use(offer, decoding, plan))]
        if self._config.router == "payoff":
            lengths = spend([seq.draft.probs for seq in decoding], len(decoding), self._now)
            for seq, length in zip(decoding, lengths, strict=True):
                seq.draft = seq.draft.trim(max(length, seq.draft.least))
        if self.costs.of(1) > 0.0:
            for use in uses:
                self._bets.place(use, decoding, without, self._now)

    def _use(self, offer: Offer, decoding: Seq[Sequence], plan: Plan) -> Use | None:
        """Let one arm draft for the sequences that the plan has for it, if any."""
        chosen = [i for i, route in enumerate(plan.routes) if route.arm == offer.arm.name]
        if not chosen:
            return None
        began = time.perf_counter()
        lengths = [plan.routes[i].length for i in chosen]
        drafts = offer.model.draft(offer.arm.name, [decoding[i] for i in chosen], lengths)
        for i, draft in zip(chosen, drafts, strict=True):
            decoding[i].draft = draft._replace(least=len(draft.tokens[:1])) if i in plan.trials else draft
        return Use(offer.arm, chosen, time.perf_counter() - began)

    def _ask(self, i: int, seq: Sequence, room: int, load: int, asked: dict[int, Asked]) -> Draft:
        limit = min(self._config.max_draft_len, room)
        if limit <= 0:
            return EMPTY
        began = time.perf_counter()
        clue = seq.drafter.clue()
        kind = (clue, load.bit_length())
        if clue == 0 or (clue < ASK and not self.asking.pays(kind)):
            return EMPTY
        draft = seq.drafter.propose(limit)
        if clue < ASK:
            asked[i] = Asked(kind, time.perf_counter() - began)
        return draft

    def _judge(
        self, decoding: Seq[Sequence], proposed: Seq[Draft], asked: dict[int, Asked]
    ) -> tuple[list[Draft], dict[int, float]]:
        """See Estimates.judge; that takes time too, which was asked for."""
        began = time.perf_counter()
        judged = self.estimates.judge(decoding, proposed)
        drafts = [i for i, draft in enumerate(proposed) if draft.tokens]
        seconds = (time.perf_counter() - began) / max(1, len(drafts))
        for i in drafts:
            if i in asked:
                asked[i].seconds += seconds
        return judged

    def _plan(self, decoding: Seq[Sequence], without: Without, means: Mapping[int, float], arms: Seq[Arm]) -> Plan:
        plan = with_models(without.plan, without.probs, arms, self._now)
        for arm in arms:
            plan = self._try_out(plan, arm, without.probs)
        return plan if self._config.router == "payoff" else self._by_score(plan, decoding, without.free, means, arms)

    def _try_out(self, plan: Plan, arm: Arm, probs: Seq[Seq[float]]) -> Plan:
        """One token each by an arm that the plan has no use for, where more is to be learned of it than is lost."""
        if any(route.arm == arm.name for route in plan.routes):
            return plan
        for sequences, must in ((arm.unseen, True), (arm.unknown[:1], False)):
            chosen = [i for i in sequences if i in arm.hopes and plan.routes[i].arm is None]
            if chosen:
                trial = use(plan, arm, chosen, 1, probs)
                if self._bets.may_try(arm, max(0.0, loss(plan, trial, self._now)), must):
                    return replace(trial, trials=(*plan.trials, *chosen))
        return plan

    def _by_score(
        self, plan: Plan, decoding: Seq[Sequence], free: Seq[Draft], means: Mapping[int, float], arms: Seq[Arm]
    ) -> Plan:
        """HVD (PAPERS 1.1) or its rule without a predictor for sequences of mode "hybrid", `plan` for the others."""
        known = {} if self._config.router == "score" else means
        trusted = [
            known.get(i, draft.score) if draft.source == "suffix" else float("inf") for i, draft in enumerate(free)
        ]
        ruled = by_score([draft.probs for draft in free], trusted, TAU, arms)
        routes = [
            rule if self.mode(seq.request) == "hybrid" else route
            for seq, rule, route in zip(decoding, ruled.routes, plan.routes, strict=True)
        ]
        return replace(plan, routes=tuple(routes))

    def watch(self, results: list[Verified], taps: Tensor | None) -> None:
        """What the pass found out, before it is committed; `taps` are the streams that an EAGLE head reads."""
        if self.eagle and taps is not None:
            began = time.perf_counter()
            self.eagle.watch(results, taps)
            self._charge([arm for arm in self._awake if arm in self.eagle.modes], time.perf_counter() - began)

    def learn(self, verified: Verified) -> None:
        """How a draft, and what sources thought of it, compares with what the full model says."""
        for model in self.models:
            model.learn(verified)
        self._bets.learn(verified)
        self.estimates.learn(verified.work.seq, verified.tokens)

    def _learn_asking(self, asked: dict[int, Asked], free: Seq[Draft], plan: Plan) -> None:
        """What each asking saved: its tokens would take so long at the step's rate, less their share of the pass."""
        if self.costs.of(1) == 0.0:  # nothing was measured, so everything pays
            return
        costs, rows, rate = self._now, plan.outlook.rows, plan.outlook.rate(self._now)
        for i, asking in asked.items():
            route, saved = plan.routes[i], -asking.seconds
            if route.arm is None and route.length:
                saved += sum(free[i].probs[: route.length]) / rate
                saved -= costs.of(rows) - costs.of(rows - route.length)
            self.asking.learn(asking.kind, saved)


def _without_predictions(arm: Arm, free: Seq[Draft]) -> Arm:
    """The arm without those whose own prediction drafts: that is tried first (HTTP contract, section 9)."""
    predicted = {i for i, draft in enumerate(free) if draft.source == "prediction" and draft.tokens}
    if not predicted:
        return arm
    return replace(arm, hopes={i: hopes for i, hopes in arm.hopes.items() if i not in predicted})


def _uses_model(plan: Plan) -> bool:
    return any(route.arm for route in plan.routes)

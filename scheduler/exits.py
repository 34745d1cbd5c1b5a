"""Early exits as a draft source: what windows they offer each sequence, how these are filled, what became of them."""

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from verdraft.model.exit_head import Exits
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.costs import measure_exits
from verdraft.scheduler.filling import WindowFiller
from verdraft.scheduler.request import EXIT_MODES, Mode
from verdraft.scheduler.runner import Runner
from verdraft.scheduler.scheduler import Scheduler
from verdraft.scheduler.sequence import Sequence
from verdraft.scheduler.verifier import Law, Verified
from verdraft.spec.agreement import FLOOR, Agreement
from verdraft.spec.draft import EMPTY, Draft
from verdraft.spec.exit_costs import ExitCosts
from verdraft.spec.pace import Pace
from verdraft.spec.pruning import MIN_LEN, Pruning
from verdraft.spec.router import Arm
from verdraft.spec.spending import Costs, CostTable
from verdraft.spec.trials import Trials
from verdraft.spec.window import Cycle

logger = logging.getLogger("verdraft.exits")


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A pass that is about to begin."""

    began: float
    expected: float  # seconds
    split: bool  # exits ran its lower segments for windows
    num_running: int


class ExitDrafter:
    """Drafts for decoding sequences whose mode allows it. Without exits no sequence's does."""

    def __init__(self, exits: Exits, runner: Runner, law: Law, scheduler: Scheduler, trials: Trials) -> None:
        config = scheduler.config
        self.exits = exits
        self.costs = ExitCosts()
        self.pruning = Pruning()
        self.num_given_up = 0  # sequences whose exits agreed too seldom with the full model
        self._runner = runner
        self._scheduler = scheduler
        self._trials = trials
        self._verdicts: dict[int, list[bool]] = {}
        self._filler = WindowFiller(exits, runner, law)
        self._cycles: dict[Mode, Cycle] = {
            mode: Cycle(config.exit_window, config.exit_round, mode == "hispec", config.exit_confidence)
            for mode in (EXIT_MODES if exits else ())
        }
        self._typical = {mode: Agreement() for mode in self._cycles}  # over all sequences
        self._typical_inner = Agreement()
        self._pace = Pace()
        self._full: Costs | None = None  # of this step's pass, if anybody asked for arms
        self._awaited: _Awaited | None = None

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes that these exits make possible."""
        return tuple(self._cycles)

    def measure(self, full: CostTable) -> None:
        """Learn what segments and heads cost here; `full` are whole passes."""
        if self.exits:
            self.costs = measure_exits(self._runner, self._config.max_context, self.exits, full)

    @property
    def _config(self) -> EngineConfig:
        return self._scheduler.config

    def prepare(self, seq: Sequence, mode: Mode) -> None:
        """Say how exits may draft for a new sequence of this mode."""
        allowed = self.modes if mode == "hybrid" else tuple(m for m in self.modes if m == mode)
        seq.exits = {m: Agreement(self._floor(self._cycles[m]), self._typical[m]) for m in allowed}
        seq.inner = Agreement(typical=self._typical_inner)

    def _floor(self, cycle: Cycle) -> float:
        """The agreement below which windows cannot pay."""
        return max(FLOOR, self.costs.break_even(cycle))

    def arms(self, decoding: Seq[Sequence], rooms: Seq[int], full: Costs) -> list[Arm]:
        """Windows of at most rooms[i] tokens for the sequences that may have them."""
        self._full = full
        arms = [self._arm(mode, cycle, decoding, rooms, full) for mode, cycle in self._cycles.items()]
        return [arm for arm in arms if arm.hopes]

    def _arm(self, mode: Mode, cycle: Cycle, decoding: Seq[Sequence], rooms: Seq[int], full: Costs) -> Arm:
        offers = [(i, seq) for i, seq in enumerate(decoding) if mode in seq.exits and rooms[i] > 0]
        agree = fmean(seq.inner.rate for _, seq in offers) if offers else 0.0
        return Arm(
            mode,
            {i: seq.exits[mode].hopes(min(cycle.window, rooms[i])) for i, seq in offers},
            partial(self._seconds, cycle, full, agree),
            unknown=[i for i, seq in offers if seq.exits[mode].on_trial],
            unseen=[i for i, seq in offers if len(seq.exits) == 1 and not seq.exits[mode].num_windows],
            saved=partial(self._saved, cycle, full),
        )

    def _seconds(self, cycle: Cycle, full: Costs, agree: float, count: int, length: int, rows: float) -> float:
        filling = self._pace.filling * self.costs.filling(cycle, length, agree, count)
        return filling - self._saved(cycle, full, min(rows, count * length), rows)

    def _saved(self, cycle: Cycle, full: Costs, drafted: float, rows: float) -> float:
        """What windows save the pass, less what it takes longer because they split it."""
        saved = self.costs.saved(cycle, drafted, rows)
        return saved - (self._pace.split - 1.0) * (full.of(rows) - saved)

    def draft(self, arm: str, seqs: list[Sequence], lengths: list[int]) -> list[Draft]:
        """Windows of this arm of at most lengths[i] > 0 tokens, where free blocks have room for them."""
        lent = [self._scheduler.lend(s, len(s.tokens) + n) - len(s.tokens) for s, n in zip(seqs, lengths, strict=True)]
        chosen = [i for i, limit in enumerate(lent) if limit > 0]
        mode = next(mode for mode in self._cycles if mode == arm)
        for i in chosen:
            seq = seqs[i]
            seq.cycle, seq.agreement = self._cycles[mode], seq.exits[mode]
            seq.agreement.num_windows += 1
        found = self._fill([seqs[i] for i in chosen], [lent[i] for i in chosen])
        filled = dict(zip(chosen, found, strict=True))
        return [filled.get(i, EMPTY) for i in range(len(seqs))]

    def _fill(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """An error here is nobody's loss: these sequences go on without exits."""
        began = time.perf_counter()
        try:
            drafts = self._filler.fill(seqs, limits)
        except Exception:
            logger.exception("exits failed; %d sequences go on without them", len(seqs))
            for seq in seqs:
                seq.exits = {}
            return [EMPTY] * len(seqs)
        self._keep_pace(seqs, limits, time.perf_counter() - began)
        return drafts

    def _keep_pace(self, seqs: list[Sequence], limits: list[int], seconds: float) -> None:
        if seqs and self.costs != ExitCosts():
            agree = fmean(seq.inner.rate for seq in seqs)
            self._pace.filled(self.costs.filling(seqs[0].cycle, max(limits), agree, len(seqs)), seconds)

    def prune(self, decoding: list[Sequence]) -> None:
        """Let L_i cut other sources' drafts where that pays, and look at one now and then to learn whether it would.
        Nothing but the pass comes after this."""
        self._verdicts.clear()
        if self.exits:
            self._prune(decoding)
            self._await_pass(decoding)

    def _prune(self, decoding: list[Sequence]) -> None:
        rows = len(decoding) + sum(len(seq.draft.tokens) for seq in decoding)
        drafting = [seq for seq in decoding if self._prunable(seq.draft)]
        cutting = [seq for seq in drafting if self.pruning.pays(self.costs, seq.draft.probs, self._others(seq, rows))]
        looking = [seq for seq in drafting if seq in cutting or self._on_trial(seq)]
        for seq, verdicts in self._judge([seq for seq in looking if self._has_room(seq)]):
            self._verdicts[seq.order] = verdicts
            if seq in cutting and False in verdicts:
                seq.draft = seq.draft.trim(verdicts.index(False))

    def _await_pass(self, decoding: list[Sequence]) -> None:
        """Have the pass timed, unless somebody's prompt is in it or L_i took rows of it before."""
        full, self._full, self._awaited = self._full, None, None
        if full is None or self.costs == ExitCosts() or self._verdicts or len(decoding) < len(self._scheduler.running):
            return
        windows = [seq for seq in decoding if seq.draft.source == "early_exit"]
        rows = len(decoding) + sum(len(seq.draft.tokens) for seq in decoding)
        drafted = sum(len(seq.draft.tokens) for seq in windows)
        saved = self.costs.saved(windows[0].cycle, drafted, rows) if windows else 0.0
        self._awaited = _Awaited(time.perf_counter(), full.of(rows) - saved, bool(windows), len(decoding))

    def learn(self, verified: Verified) -> None:
        """What the full model says of a window, or how what L_i said of another source's draft compares with it. The
        first of a pass says how long it took."""
        awaited, self._awaited = self._awaited, None
        if awaited and awaited.num_running == len(self._scheduler.running):  # nobody joined it
            self._pace.passed(awaited.expected, time.perf_counter() - awaited.began, awaited.split)
        if verified.work.draft.source == "early_exit":
            self._learn_window(verified.work.seq, len(verified.work.draft.tokens), len(verified.tokens) - 1)
        verdicts = self._verdicts.get(verified.work.seq.order)
        if verdicts is not None:
            judged = verdicts[: len(verified.work.draft.tokens)]
            self.pruning.learn(judged, len(verified.tokens) - 1)

    def _prunable(self, draft: Draft) -> bool:
        """A tree's nodes cannot leave one by one: their KV is in the order of the nodes."""
        return draft.source != "early_exit" and not draft.parents and len(draft.tokens) >= MIN_LEN

    def _others(self, seq: Sequence, rows: int) -> int:
        return rows - len(seq.draft.tokens)

    def _on_trial(self, seq: Sequence) -> bool:
        look = self.costs.look(1 + len(seq.draft.tokens)) / max(self.costs.full.of(1), 1e-9)
        return self.pruning.wants_trial() and self._trials.may_spend(look)

    def _has_room(self, seq: Sequence) -> bool:
        wanted = len(seq.tokens) + len(seq.draft.tokens)
        return self._scheduler.lend(seq, wanted) == wanted

    def _judge(self, seqs: list[Sequence]) -> list[tuple[Sequence, list[bool]]]:
        """An error here is nobody's loss either: the drafts stay as they are."""
        if not seqs:
            return []
        try:
            return list(zip(seqs, self._filler.judge(seqs), strict=True))
        except Exception:
            logger.exception("exits failed to judge %d drafts", len(seqs))
            return []

    def _learn_window(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """Give exits up for a sequence where they agree too seldom with the full model."""
        seq.agreement.learn(drafted, accepted)
        mode = next((mode for mode, agreement in seq.exits.items() if agreement is seq.agreement), None)
        if mode is None:
            return
        self._typical[mode].learn(drafted, accepted)
        if seq.agreement.given_up:
            del seq.exits[mode]
            if not seq.exits:
                seq.request.stats.given_up = True
                self.num_given_up += 1

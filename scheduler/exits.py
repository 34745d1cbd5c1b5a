"""Early exits as a draft source: which sequences get a window, how long it may be, and when they are given up."""

import logging

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
from verdraft.spec.pruning import MIN_LEN, Pruning
from verdraft.spec.spending import CostTable
from verdraft.spec.window import NO_CYCLE, Cycle

logger = logging.getLogger("verdraft.exits")


class ExitDrafter:
    """Drafts for decoding sequences whose mode asks for it. Without exits no sequence's does."""

    def __init__(self, exits: Exits, runner: Runner, law: Law, scheduler: Scheduler) -> None:
        self.exits = exits
        self.costs = ExitCosts()
        self._runner = runner
        self._scheduler = scheduler
        self.pruning = Pruning()
        self._verdicts: dict[int, list[bool]] = {}
        self._filler = WindowFiller(exits, runner, law)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes that these exits make possible."""
        return EXIT_MODES if self.exits else ()

    def measure(self, full: CostTable) -> None:
        """Learn what segments and heads cost here; `full` are whole passes."""
        if self.exits:
            self.costs = measure_exits(self._runner, self._config.max_context, self.exits, full)

    @property
    def _config(self) -> EngineConfig:
        return self._scheduler.config

    def cycle(self, mode: Mode) -> Cycle:
        """How exits draft in this mode: not at all in most."""
        if mode not in self.modes:
            return NO_CYCLE
        config = self._config
        return Cycle(config.exit_window, config.exit_round, mode == "hispec", config.exit_confidence)

    def agreement(self, cycle: Cycle) -> Agreement:
        """A new sequence's: exits are given up where they cannot pay."""
        return Agreement(max(FLOOR, self.costs.break_even(cycle)))

    def draft(self, decoding: list[Sequence], drafts: list[Draft], rooms: list[int]) -> list[Draft]:
        """`drafts`, and a window of at most rooms[i] tokens where exits are wanted and another source has nothing."""
        wanting = [i for i, seq in enumerate(decoding) if seq.cycle.window and not drafts[i].tokens]
        if not wanting:
            return drafts
        limits = {i: self._limit(decoding[i], rooms[i], len(wanting), len(decoding)) for i in wanting}
        chosen = [i for i in wanting if limits[i] > 0]
        found = self._fill([decoding[i] for i in chosen], [limits[i] for i in chosen])
        filled = dict(zip(chosen, found, strict=True))
        return [filled.get(i, draft) for i, draft in enumerate(drafts)]

    def prune(self, decoding: list[Sequence]) -> None:
        """Let L_i cut other sources' drafts where that pays, and look at one now and then to learn whether it would."""
        self._verdicts.clear()
        if not self.exits:
            return
        rows = len(decoding) + sum(len(seq.draft.tokens) for seq in decoding)
        drafting = [seq for seq in decoding if self._prunable(seq.draft)]
        cutting = [seq for seq in drafting if self.pruning.pays(self.costs, seq.draft.probs, self._others(seq, rows))]
        looking = [seq for seq in drafting if seq in cutting or self.pruning.wants_trial()]
        for seq, verdicts in self._judge([seq for seq in looking if self._has_room(seq)]):
            self._verdicts[seq.order] = verdicts
            if seq in cutting and False in verdicts:
                seq.draft = seq.draft.trim(verdicts.index(False))

    def learn(self, verified: Verified) -> None:
        """How what L_i said of a draft compares with what the full model says."""
        verdicts = self._verdicts.get(verified.work.seq.order)
        if verdicts is not None:
            judged = verdicts[: len(verified.work.draft.tokens)]
            self.pruning.learn(judged, len(verified.tokens) - 1)

    def _prunable(self, draft: Draft) -> bool:
        """A tree's nodes cannot leave one by one: their KV is in the order of the nodes."""
        return draft.source != "early_exit" and not draft.parents and len(draft.tokens) >= MIN_LEN

    def _others(self, seq: Sequence, rows: int) -> int:
        return rows - len(seq.draft.tokens)

    def _has_room(self, seq: Sequence) -> bool:
        seq.roll_back(seq.computed[-1])
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

    def _limit(self, seq: Sequence, room: int, num_windows: int, num_decoding: int) -> int:
        """As many tokens as pay, as may still come, and as free blocks have room for."""
        keep, agree = seq.agreement.rate, seq.inner.rate
        paying = self.costs.best_length(seq.cycle, keep, agree, num_windows, num_decoding)
        limit = min(room, max(paying, int(seq.agreement.on_trial)))  # who asks for exits gets a trial
        return self._scheduler.lend(seq, len(seq.tokens) + limit) - len(seq.tokens) if limit > 0 else 0

    def _fill(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """An error here is nobody's loss: these sequences go on without exits."""
        try:
            return self._filler.fill(seqs, limits)
        except Exception:
            logger.exception("exits failed; %d sequences go on without them", len(seqs))
            for seq in seqs:
                seq.cycle = NO_CYCLE
            return [EMPTY] * len(seqs)

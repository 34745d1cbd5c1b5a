"""An EAGLE head as a draft source: which sequences it drafts for, how long, and what is learned from verification."""

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from verdraft.model.eagle import EagleHead
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.costs import measure_eagle
from verdraft.scheduler.features import Features
from verdraft.scheduler.growth import DraftGrower, Growth, SeenBlocks
from verdraft.scheduler.request import Mode
from verdraft.scheduler.runner import Runner
from verdraft.scheduler.scheduler import Scheduler
from verdraft.scheduler.sequence import Sequence
from verdraft.scheduler.verifier import Law, Verified
from verdraft.spec.agreement import Agreement
from verdraft.spec.calibration import Calibration
from verdraft.spec.draft import EMPTY, Draft
from verdraft.spec.eagle_costs import EagleCosts
from verdraft.spec.growing import Growing
from verdraft.spec.spending import CostTable

logger = logging.getLogger("verdraft.eagle")

MOST_WAITING = 256  # rows of one sequence that wait for the drafter; more are computed even if nothing is drafted
LONGEST_REST = 32  # steps without a draft where none pays; then one is made, to see whether that is still so
PATIENCE = 8  # drafts that may come to nothing before the head rests at all; then ever longer


class EagleDrafter:
    """Follows the sequences that may get its drafts, and drafts for those that want one."""

    def __init__(self, head: EagleHead, runner: Runner, law: Law, scheduler: Scheduler) -> None:
        self.costs = EagleCosts()
        self.calibration = Calibration()
        self._overall = Agreement()
        self._runner, self._law, self._scheduler = runner, law, scheduler
        config = scheduler.config
        pool = head.new_pool(config.num_blocks, config.block_size)
        vocab_size = runner.model.config.vocab_size
        seen = SeenBlocks(config.block_size)
        self._grower = DraftGrower(head, pool, config.block_size, vocab_size, law, self.calibration, seen)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes that a head makes possible."""
        return ("eagle",)

    @property
    def _config(self) -> EngineConfig:
        return self._scheduler.config

    def measure(self, full: CostTable) -> None:
        """Learn what the drafter costs here; `full` are whole passes of the target."""
        self.costs = measure_eagle(self._runner, self._config.max_context, self._grower.head, self._grower.pool, full)

    def agreement(self, mode: Mode) -> Agreement | None:
        """A new sequence's; None: it does without the head."""
        return Agreement(rate=self._overall.rate) if mode in self.modes else None

    def probs(self, seq: Sequence, length: int) -> tuple[float, ...]:
        """Before anything is drafted: the chance that the first 1, 2, .. `length` tokens would all be accepted."""
        return seq.eagle.probs(length) if seq.eagle else ()

    # ---- following sequences

    def watch(self, results: Iterable[Verified], taps: Tensor) -> None:
        """Keep what the target computed for the tokens that stay; before they are committed."""
        end = 0
        for result in results:
            start, end = end, end + result.work.num_tokens
            if result.work.seq.eagle:
                self._keep(result, taps[start:end])

    def _keep(self, result: Verified, rows: Tensor) -> None:
        work, seq = result.work, result.work.seq
        known, path = work.num_tokens - len(work.draft.tokens), result.path
        rows = rows[[*range(known), *(known + node for node in path)]]  # a copy: the pass's other rows can go
        if seq.features is None or seq.features.end != work.start:
            first = self._grower.seen.reach(seq, work.start)
            rows = rows[max(0, first - work.start) :]
            seq.features = Features(first=first, computed=max(first, work.start)) if len(rows) else None
        if seq.features:
            seq.features.waiting.append(rows)

    def learn(self, result: Verified) -> None:
        """What the target says of an EAGLE draft."""
        seq, draft = result.work.seq, result.work.draft
        if draft.source != "eagle" or seq.eagle is None or seq.features is None:
            return
        accepted = {-1, *result.path}
        for node, parent in enumerate(draft.parents or range(-1, len(draft.tokens) - 1)):
            if parent in accepted:
                self.calibration.learn(seq.features.claims[node], node in accepted)
        for agreement in (seq.eagle, self._overall):
            agreement.learn(max(draft.depths, default=0), len(result.path))

    # ---- drafting

    @torch.inference_mode()
    def draft(self, decoding: list[Sequence], drafts: list[Draft], rooms: list[int]) -> list[Draft]:
        """`drafts`, and one of at most rooms[i] tokens where the head is wanted and another source has nothing."""
        late = [seq for seq in self._scheduler.running if seq.features and seq.features.num_waiting > MOST_WAITING]
        wanting = [i for i, seq in enumerate(decoding) if seq.eagle and not drafts[i].tokens]
        growths = {i: self._growth(decoding[i], rooms[i], len(wanting), len(decoding)) for i in wanting}
        chosen = {i: growth for i, growth in growths.items() if growth}
        found = dict(zip(chosen, self._grow(list(chosen.values()), late, len(decoding)), strict=True))
        return [found.get(i, draft) for i, draft in enumerate(drafts)]

    def _growth(self, seq: Sequence, room: int, num_drafting: int, num_decoding: int) -> Growth | None:
        """An empty draft that may grow, unless it would not pay or has no room."""
        features, shape = seq.features, self._config.eagle
        if seq.eagle is None or features is None or features.end != len(seq.tokens) - 1:
            return None
        if features.rest:
            features.rest -= 1
            return None
        if not seq.eagle.on_trial and not self.costs.best_length(
            shape.depth, seq.eagle.rate, num_drafting, num_decoding
        ):
            features.rest = LONGEST_REST
        limit = min(room, shape.tokens)
        seq.roll_back(seq.computed[-1])  # from a window for which the last step had no room
        limit = self._scheduler.lend(seq, len(seq.tokens) + limit) - len(seq.tokens) if limit > 0 else 0
        growing = Growing(shape.depth, shape.topk, limit, self._law.ends(seq))
        return Growth(seq, features, growing) if limit > 0 else None

    def _grow(self, growths: list[Growth], late: list[Sequence], num_decoding: int) -> list[Draft]:
        """An error here is nobody's loss: these sequences go on without the head."""
        seqs = list(dict.fromkeys([*late, *(growth.seq for growth in growths)]))
        try:
            self._grower.extend(seqs)
            self._grower.grow(growths, lambda active: self._goes_on(growths, active, num_decoding))
        except Exception:
            logger.exception("the EAGLE head failed; %d sequences go on without it", len(seqs))
            for seq in seqs:
                seq.eagle = seq.features = None
            return [EMPTY] * len(growths)
        return [self._draft_of(growth, num_decoding) for growth in growths]

    def _goes_on(self, growths: list[Growth], active: Seq[Growth], num_decoding: int) -> list[bool]:
        """Which of the active drafts get another level."""
        expected = num_decoding + sum(sum(growth.growing.probs) for growth in growths)
        rows = num_decoding + sum(len(growth.growing.tokens) for growth in growths)
        hopes = [growth.growing.hope * (growth.seq.eagle.rate if growth.seq.eagle else 0.0) for growth in active]
        return self.costs.worth_growing(hopes, expected, rows)

    def _draft_of(self, growth: Growth, num_decoding: int) -> Draft:
        features = growth.features
        draft, features.claims = growth.growing.draft("eagle")
        worth = bool(draft.probs) and self.costs.worth_verifying(draft.probs[0], num_decoding)
        features.num_idle = 0 if worth else features.num_idle + 1
        if features.num_idle > PATIENCE:
            features.rest = max(features.rest, min(LONGEST_REST, 2 ** (features.num_idle - PATIENCE)))
        return draft

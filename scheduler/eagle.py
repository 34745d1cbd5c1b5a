"""An EAGLE head as a draft source: which sequences it drafts for, how long, and what is learned from verification."""

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from statistics import fmean

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
from verdraft.spec.router import Arm
from verdraft.spec.spending import CostTable

logger = logging.getLogger("verdraft.eagle")

MOST_WAITING = 256  # rows of one sequence that wait for the drafter; more are computed even if nothing is drafted
LONGEST_REST = 32  # steps without a draft where the head's own claims made none worth verifying; then one is made
PATIENCE = 8  # drafts that may come to nothing before the head rests at all; then ever longer


class EagleDrafter:
    """Follows the sequences that may get its drafts, and drafts for those that want one."""

    def __init__(self, head: EagleHead, runner: Runner, law: Law, scheduler: Scheduler) -> None:
        self.costs = EagleCosts()
        self.calibration = Calibration()
        self._typical = Agreement()  # over all sequences
        self._num_decoding = 0  # in this step
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

    def prepare(self, seq: Sequence, mode: Mode) -> None:
        """Follow a new sequence if its mode may use the head."""
        seq.eagle = Agreement(typical=self._typical) if mode in (*self.modes, "hybrid") else None

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
        for agreement in (seq.eagle, self._typical):
            agreement.learn(max(draft.depths, default=0), len(result.path))

    # ---- drafting

    def arms(self, decoding: list[Sequence], rooms: Seq[int]) -> list[Arm]:
        """Chains or trees for the sequences whose features are all there."""
        self._catch_up()
        self._num_decoding = len(decoding)
        ready = [(i, seq) for i, seq in enumerate(decoding) if self._ready(seq) and rooms[i] > 0]
        offers = {i: (seq.eagle, seq.features) for i, seq in ready if seq.eagle and seq.features}
        if not offers:
            return []
        depth, topk, most = self._config.eagle.depth, self._config.eagle.topk, self._config.eagle.tokens
        waiting = round(fmean(features.num_waiting for _, features in offers.values()))
        return [
            Arm(
                "eagle",
                {i: agreement.hopes(min(depth, rooms[i])) for i, (agreement, _) in offers.items()},
                lambda count, length, _: self.costs.drafting(length, count, max(1, waiting)),
                rows_at=[min(most, topk * level) for level in range(1, depth + 1)] if topk > 1 else (),
                unknown=[i for i, (agreement, _) in offers.items() if agreement.on_trial],
                unseen=[i for i, seq in ready if seq.eagle and not (seq.exits or seq.eagle.num_windows)],
            )
        ]

    def _ready(self, seq: Sequence) -> bool:
        features = seq.features
        if features is None or features.end != len(seq.tokens) - 1:
            return False
        features.rest = max(0, features.rest - 1)
        return not features.rest

    @torch.inference_mode()
    def _catch_up(self) -> None:
        """Compute what has waited for long, whether anything is drafted or not."""
        late = [seq for seq in self._scheduler.running if seq.features and seq.features.num_waiting > MOST_WAITING]
        if late:
            self._guarded(late, lambda: self._grower.extend(late))

    @torch.inference_mode()
    def draft(self, arm: str, seqs: list[Sequence], lengths: list[int]) -> list[Draft]:
        """Chains or trees of at most lengths[i] levels, as long as another level pays by what the head says now."""
        growths = [self._growth(seq, levels) for seq, levels in zip(seqs, lengths, strict=True)]
        growing = [growth for growth in growths if growth]
        self._guarded([growth.seq for growth in growing], lambda: self._grow(growing))
        return [self._draft_of(growth) if growth and growth.seq.eagle else EMPTY for growth in growths]

    def _growth(self, seq: Sequence, levels: int) -> Growth | None:
        """An empty draft that may grow, unless it has no room."""
        features, shape = seq.features, self._config.eagle
        assert features is not None
        assert seq.eagle is not None
        seq.eagle.num_windows += 1
        limit = shape.tokens if shape.topk > 1 else levels
        limit = min(limit, seq.max_len - len(seq.tokens) - 1)
        seq.roll_back(seq.computed[-1])  # from a window for which the last step had no room
        limit = self._scheduler.lend(seq, len(seq.tokens) + limit) - len(seq.tokens) if limit > 0 else 0
        growing = Growing(levels, shape.topk, limit, self._law.ends(seq))
        return Growth(seq, features, growing) if limit > 0 else None

    def _grow(self, growths: list[Growth]) -> None:
        self._grower.extend([growth.seq for growth in growths])
        self._grower.grow(growths, lambda active: self._goes_on(growths, active))

    def _guarded(self, seqs: list[Sequence], work: Callable[[], None]) -> None:
        """An error here is nobody's loss: these sequences go on without the head."""
        try:
            work()
        except Exception:
            logger.exception("the EAGLE head failed; %d sequences go on without it", len(seqs))
            for seq in seqs:
                seq.eagle = seq.features = None

    def _goes_on(self, growths: list[Growth], active: Seq[Growth]) -> list[bool]:
        """Which of the active drafts get another level."""
        expected = self._num_decoding + sum(sum(growth.growing.probs) for growth in growths)
        rows = self._num_decoding + sum(len(growth.growing.tokens) for growth in growths)
        hopes = [growth.growing.hope * (growth.seq.eagle.rate if growth.seq.eagle else 0.0) for growth in active]
        return self.costs.worth_growing(hopes, expected, rows)

    def _draft_of(self, growth: Growth) -> Draft:
        features = growth.features
        draft, features.claims = growth.growing.draft("eagle")
        worth = bool(draft.probs) and self.costs.worth_verifying(draft.probs[0], self._num_decoding)
        features.num_idle = 0 if worth else features.num_idle + 1
        if features.num_idle > PATIENCE:
            features.rest = min(LONGEST_REST, 2 ** (features.num_idle - PATIENCE))
        return draft

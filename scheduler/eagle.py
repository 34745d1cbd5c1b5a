"""An EAGLE head as a draft source: which sequences it drafts for, how long, and what is learned from verification."""

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from functools import partial
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from verdraft.model.eagle import EagleHead
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.costs import measure_eagle
from verdraft.scheduler.features import Features
from verdraft.scheduler.growth import DraftGrower, Growth, SeenBlocks
from verdraft.scheduler.hearing import Listener
from verdraft.scheduler.request import Mode
from verdraft.scheduler.runner import Runner
from verdraft.scheduler.scheduler import Scheduler
from verdraft.scheduler.sequence import Sequence
from verdraft.scheduler.verifier import Law, Verified
from verdraft.spec.calibration import Calibration
from verdraft.spec.draft import EMPTY, Draft
from verdraft.spec.eagle_costs import EagleCosts
from verdraft.spec.growing import Growing
from verdraft.spec.payback import Payback
from verdraft.spec.router import Arm
from verdraft.spec.spending import FREE, Costs, CostTable

logger = logging.getLogger("verdraft.eagle")

MOST_WAITING = 64  # rows of a sequence that wait for the drafter: 256 delayed it and made it right no more often
USUALLY_WAITING = 3  # rows from one draft to the next; more are an expense that later drafts do not have, so no price
UNKNOWN_AFTER = 32  # chances to draft that were left unused; by then the text may be another kind


class EagleDrafter:
    """Follows the sequences that may get its drafts, and drafts for those that want one."""

    def __init__(self, head: EagleHead, runner: Runner, law: Law, scheduler: Scheduler) -> None:
        self.costs = EagleCosts()
        self.calibration = Calibration()
        self._typical = Payback()  # over all sequences
        self._num_decoding = 0  # in this step
        self._full: Costs = FREE  # of its pass
        self._runner, self._law, self._scheduler = runner, law, scheduler
        config = scheduler.config
        pool = head.new_pool(config.num_blocks, config.block_size)
        vocab_size = runner.model.config.vocab_size
        seen = SeenBlocks(config.block_size)
        listener = Listener(head, runner.device, runner.model.device)
        self._grower = DraftGrower(
            head, listener, pool, config.block_size, vocab_size, law, self.calibration, seen, runner.device
        )

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes that a head makes possible."""
        return ("eagle",)

    @property
    def _weighed(self) -> bool:
        """Whether drafts are as long as pays, or always as long as they may be (PAPERS 1.4)."""
        return self._config.router == "payoff"

    @property
    def _config(self) -> EngineConfig:
        return self._scheduler.config

    def measure(self, full: CostTable) -> None:
        """Learn what the drafter costs here."""
        self.costs = measure_eagle(self._runner, self._config.max_context, self._grower.head, self._grower.pool)

    def prepare(self, seq: Sequence, mode: Mode) -> None:
        """Follow a new sequence if its mode may use the head."""
        seq.eagle = self._typical.fresh() if mode in (*self.modes, "hybrid") else None

    # ---- following sequences

    def follow(self, seqs: Iterable[Sequence], wanted: bool) -> None:
        """Say whether what the target computes of these sequences, and of new ones, is kept from now on."""
        self._typical.followed = wanted
        for seq in seqs:
            if seq.eagle:
                seq.eagle.followed = wanted

    def watch(self, results: Iterable[Verified], taps: Tensor) -> None:
        """Keep what the target computed for the tokens that stay; before they are committed."""
        end = 0
        for result in results:
            start, end = end, end + result.work.num_tokens
            if result.work.seq.is_followed and not result.work.seq.finished:
                rows = taps[start:end]
                self._guarded([result.work.seq], partial(self._keep, result, rows))

    def _keep(self, result: Verified, rows: Tensor) -> None:
        work, seq = result.work, result.work.seq
        known, path = work.num_tokens - len(work.draft.tokens), result.path
        kept = known + len(path)  # copies, so that the pass's other rows can go
        if work.draft.parents:
            places = np.array([*range(known), *(known + node for node in path)], np.int64)
            rows = rows[self._runner.device.put([places])[0]]
        else:
            rows = rows[:kept].clone()
        if seq.features is None or seq.features.end != work.start:
            first = self._grower.seen.reach(seq, work.start)
            rows = rows[max(0, first - work.start) :]
            start = max(first, work.start)
            seq.features = Features(first=first, computed=start, end=start) if len(rows) else None
        if seq.features:
            seq.features.push(rows)
            seq.features.forget(MOST_WAITING, self._config.block_size)

    def learn(self, result: Verified) -> None:
        """What the target says of an EAGLE draft."""
        seq, draft = result.work.seq, result.work.draft
        if draft.source != "eagle" or seq.eagle is None or seq.features is None:
            return
        accepted = {-1, *result.path}
        for node, parent in enumerate(draft.parents or range(-1, len(draft.tokens) - 1)):
            if parent in accepted:
                self.calibration.learn(seq.features.claims[node], node in accepted)
        for payback in (seq.eagle, self._typical):
            payback.learn(len(draft.tokens), max(draft.depths, default=0), len(result.path))

    # ---- drafting

    def arms(self, decoding: list[Sequence], rooms: Seq[int], full: Costs) -> list[Arm]:
        """Chains or trees for the sequences whose features are all there: in one piece, since how long each gets is
        seen while it grows, or by levels where that is not weighed."""
        self._num_decoding, self._full = len(decoding), full
        offers = {i: seq.eagle for i, seq in enumerate(decoding) if rooms[i] > 0 and seq.eagle and _is_followed(seq)}
        if not offers:
            return []
        waiting = round(fmean(min(_num_waiting(decoding[i]), USUALLY_WAITING) for i in offers))
        levels = fmean(payback.levels for payback in offers.values()) - 1 if self._weighed else 0
        arm = Arm(
            "eagle",
            {i: self._hopes(payback, rooms[i]) for i, payback in offers.items()},
            lambda count, length, _: self.costs.drafting(length + levels, count, max(1, waiting)),
            rows_at={i: self._rows(payback, rooms[i]) for i, payback in offers.items()},
            unknown=[i for i, payback in offers.items() if _is_unknown(payback)],
            unseen=[i for i, payback in offers.items() if not (decoding[i].exits or payback.num_drafts)],
        )
        for payback in offers.values():
            payback.num_unused += 1  # unless it is chosen now
        return [arm]

    def _hopes(self, payback: Payback, room: int) -> Seq[float]:
        """Accepted tokens by levels."""
        return (payback.accepted,) if self._weighed else payback.agreement.hopes(min(self._config.eagle.depth, room))

    def _rows(self, payback: Payback, room: int) -> Seq[float]:
        """Verified tokens by levels."""
        shape = self._config.eagle
        return (
            (payback.verified,)
            if self._weighed
            else [min(shape.tokens, shape.topk * (i + 1)) for i in range(shape.depth)]
        )

    @torch.inference_mode()
    def draft(self, arm: str, seqs: list[Sequence], lengths: list[int]) -> list[Draft]:
        """Chains or trees: of as many levels as pay by what the head says now, or of lengths[i] levels."""
        depth = self._config.eagle.depth
        levels = [depth] * len(seqs) if self._weighed else lengths
        growths = [self._growth(seq, most) for seq, most in zip(seqs, levels, strict=True)]
        growing = [growth for growth in growths if growth]
        self._guarded([growth.seq for growth in growing], lambda: self._timed(growing))
        return [self._draft_of(growth) if growth and growth.seq.eagle else EMPTY for growth in growths]

    def _growth(self, seq: Sequence, levels: int) -> Growth | None:
        """An empty draft that may grow, unless it has no room."""
        features, shape = seq.features, self._config.eagle
        assert features is not None
        limit = shape.tokens if shape.topk > 1 else levels
        limit = min(limit, seq.max_len - len(seq.tokens) - 1)
        limit = self._scheduler.lend(seq, len(seq.tokens) + limit) - len(seq.tokens) if limit > 0 else 0
        growing = Growing(levels, shape.topk, limit, self._law.ends(seq))
        return Growth(seq, features, growing) if limit > 0 else None

    def _timed(self, growths: list[Growth]) -> None:
        waiting = round(fmean(_num_waiting(growth.seq) for growth in growths)) if growths else 0
        began = time.perf_counter()
        self._grow(growths)
        levels = fmean(growth.growing.num_levels for growth in growths) if growths else 0
        self.costs = self.costs.seen(levels, len(growths), waiting, time.perf_counter() - began)

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
        if not self._weighed:
            return [True] * len(active)
        expected = self._num_decoding + sum(sum(growth.growing.probs) for growth in growths)
        rows = self._num_decoding + sum(len(growth.growing.tokens) for growth in growths)
        typical = self._typical.agreement.rate  # of the next level's tokens, behind right ones
        hopes = [growth.growing.hope * typical for growth in active]
        return self.costs.worth_growing(hopes, expected, rows, self._full)

    def _draft_of(self, growth: Growth) -> Draft:
        draft, growth.features.claims = growth.growing.draft("eagle")
        for payback in (growth.seq.eagle, self._typical):
            if payback:
                payback.drafted(growth.growing.num_levels)
        return draft


def _num_waiting(seq: Sequence) -> int:
    return seq.features.end - seq.features.computed if seq.features else 0


def _is_followed(seq: Sequence) -> bool:
    """Whether the head knows or will know all of it."""
    return seq.features is not None and seq.features.end == len(seq.tokens) - 1


def _is_unknown(payback: Payback) -> bool:
    return payback.agreement.on_trial or payback.num_unused > UNKNOWN_AFTER

"""The first part of a step: every decoding sequence gets a draft, and of all drafts as much is kept as pays."""

import logging

from torch import Tensor

from verdraft.scheduler.eagle import EagleDrafter
from verdraft.scheduler.exits import ExitDrafter
from verdraft.scheduler.request import Mode, Request
from verdraft.scheduler.scheduler import Scheduler
from verdraft.scheduler.sequence import Sequence
from verdraft.scheduler.verifier import Verified
from verdraft.spec.draft import EMPTY, Draft, Drafter, NoDrafter
from verdraft.spec.sources import make_drafter
from verdraft.spec.spending import FREE, CostTable, spend
from verdraft.spec.suffix import SuffixStores

logger = logging.getLogger("verdraft.engine")


class Drafting:
    """Knows the server's draft sources and what a pass costs; sets `seq.draft` of running sequences."""

    def __init__(self, scheduler: Scheduler, exits: ExitDrafter, eagle: EagleDrafter | None) -> None:
        self.costs = FREE
        self.exits = exits
        self.eagle = eagle
        self.stores = SuffixStores(scheduler.config.suffix_store_tokens)
        self._scheduler = scheduler
        self._config = scheduler.config

    @property
    def modes(self) -> tuple[Mode, ...]:
        """What a request's `speculation` may ask for."""
        return ("auto", "off", "suffix", *self.exits.modes, *(self.eagle.modes if self.eagle else ()))

    def measure(self, full: CostTable) -> None:
        """Learn what each source costs here; `full` are whole passes."""
        self.costs = full
        self.exits.measure(full)
        if self.eagle:
            self.eagle.measure(full)

    def mode(self, request: Request) -> Mode:
        """What the request's `speculation` means here; never "auto"."""
        return self._config.speculation if request.speculation == "auto" else request.speculation

    def drafter(self, request: Request) -> Drafter:
        """The free sources of a new sequence: those that need no pass over any layer."""
        mode = self.mode(request)
        assert mode != "auto", "the configuration says what that means"
        # The smallest index that the source allows, for models of a very short context.
        remembered = max(32, self._config.max_model_len)
        store = self.stores.of(request.cache_salt) if mode == "suffix" else None
        return make_drafter(mode, request.prediction, store, remembered, request.constraint)

    def draft(self) -> None:
        """Ask every decoding sequence's source for a draft, and keep as much of them all as pays."""
        running = self._scheduler.running
        decoding = [seq for seq in running if seq.decoding]
        budget = self._config.max_batch_tokens
        if len(decoding) < len(running):
            budget //= 2  # the other half is for those that are still prefilled
        share = budget // max(1, len(decoding)) - 1
        drafts = [self._propose(seq, share) for seq in decoding]
        rooms = [self._room(seq, share) for seq in decoding]
        drafts = self.exits.draft(decoding, drafts, rooms)
        drafts = self.eagle.draft(decoding, drafts, rooms) if self.eagle else drafts
        lengths = spend([draft.probs for draft in drafts], len(decoding), self.costs)
        for seq, draft, length in zip(decoding, drafts, lengths, strict=True):
            seq.draft = draft.trim(max(length, draft.least))
        self.exits.prune(decoding)

    def watch(self, results: list[Verified], taps: Tensor | None) -> None:
        """What the pass found out, before it is committed; `taps` are the streams that an EAGLE head reads."""
        if self.eagle and taps is not None:
            self.eagle.watch(results, taps)

    def learn(self, result: Verified) -> None:
        """How a draft, and what exits and heads thought of it, compares with what the full model says."""
        self.exits.learn(result)
        if self.eagle:
            self.eagle.learn(result)

    def _propose(self, seq: Sequence, share: int) -> Draft:
        limit = min(self._config.max_draft_len, self._room(seq, share))
        try:
            return seq.drafter.propose(limit) if limit > 0 else EMPTY
        except Exception:  # drafts are free to be wrong, so a source that fails costs speed and no request
            logger.exception("request %s goes on without drafts", seq.request.id)
            seq.drafter = NoDrafter()
            return EMPTY

    def _room(self, seq: Sequence, share: int) -> int:
        """The pass itself yields one token, so the draft needs at most one less than what may still come."""
        return min(share, seq.max_len - len(seq.tokens) - 1)

"""The engine: step() is draft, schedule, execute, commit. Knows no thread, no text and no HTTP."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from verdraft.kernels.chooser import choose_philox
from verdraft.kernels.sampling import AllTokensMasked, BadLogits
from verdraft.model.exit_head import Exits
from verdraft.model.transformer import Transformer
from verdraft.scheduler.commit import Committer
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.costs import measure_costs
from verdraft.scheduler.counters import EngineCounters, Totals
from verdraft.scheduler.errors import ContextTooLong
from verdraft.scheduler.exits import ExitDrafter
from verdraft.scheduler.faults import inject_before, inject_nan, wants_preemption
from verdraft.scheduler.outputs import TokenSlice
from verdraft.scheduler.plan import Work
from verdraft.scheduler.request import Mode, Request
from verdraft.scheduler.runner import Runner
from verdraft.scheduler.scheduler import Scheduler
from verdraft.scheduler.sequence import Sequence
from verdraft.scheduler.verifier import Failed, Law, Verified, Verifier
from verdraft.spec.constraint import ConstraintFailed
from verdraft.spec.draft import EMPTY, Draft, Drafter, NoDrafter
from verdraft.spec.sources import make_drafter
from verdraft.spec.spending import FREE, spend
from verdraft.spec.suffix import SuffixStores

logger = logging.getLogger("verdraft.engine")

Output = tuple[Request, TokenSlice]
DrafterFactory = Callable[[Request], Drafter]
NO_EXITS = Exits()


class Engine:
    """Everything between token ids in and token ids out. One thread at a time may call it."""

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        drafter_factory: DrafterFactory | None = None,
        exits: Exits = NO_EXITS,
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.stores = SuffixStores(config.suffix_store_tokens)
        self.totals = Totals()
        self.costs = FREE
        pool = model.new_pool(config.num_blocks, config.block_size)
        self._runner = Runner(model, pool, config.block_size, exits.bounds(model.config.num_layers))
        law = Law(tuple(sorted(config.eos_token_ids)), choose_philox())
        self._verifier = Verifier(law)
        self.exits = ExitDrafter(exits, self._runner, law, self.scheduler)
        self._committer = Committer(self.scheduler, self.totals, config.eos_token_ids)
        self._make_drafter = drafter_factory or self._default_drafter
        self._sequences: dict[Request, Sequence] = {}
        self._order = 0

    def measure(self) -> None:
        """Learn what a pass costs here, so that drafts are no longer than pays; before the first request."""
        assert not self._sequences
        self.costs = measure_costs(self._runner, self.config.max_context)
        self.exits.measure(self.costs)
        logger.info("a pass costs %s", ", ".join(f"{1e3 * s:.1f} ms for {n}" for n, s in self.costs.points()))

    @property
    def modes(self) -> tuple[Mode, ...]:
        """What a request's `speculation` may ask for."""
        return ("auto", "off", "suffix", *self.exits.modes)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # ---- requests

    def check_fits(self, prompt_len: int) -> None:
        """Raise ContextTooLong for a prompt that can never be served."""
        if prompt_len > self.config.max_prompt_len:
            raise ContextTooLong(prompt_len, self.config.max_prompt_len)

    def add(self, request: Request, leader: Request | None = None) -> None:
        """Queue a request; `leader` is another choice of the same prompt whose prefix it will share."""
        self.check_fits(len(request.prompt))
        room = self.config.max_model_len - len(request.prompt)
        wanted = request.params.max_tokens
        self._order += 1
        cycle = self.exits.cycle(self._mode(request))
        seq = Sequence(
            request,
            self._order,
            self._make_drafter(request),
            num_segments=self._runner.num_segments,
            max_len=len(request.prompt) + (room if wanted is None else min(wanted, room)),
            cycle=cycle,
            agreement=self.exits.agreement(cycle),
            leader=self._sequences.get(leader) if leader else None,
        )
        self.scheduler.add(seq)
        self._sequences[request] = seq

    def _mode(self, request: Request) -> Mode:
        return self.config.speculation if request.speculation == "auto" else request.speculation

    def _default_drafter(self, request: Request) -> Drafter:
        mode = self._mode(request)
        assert mode != "auto", "the configuration says what that means"
        # The smallest index that the source allows, for models of a very short context.
        remembered = max(32, self.config.max_model_len)
        store = self.stores.of(request.cache_salt) if mode == "suffix" else None
        return make_drafter(mode, request.prediction, store, remembered, request.constraint)

    def abort(self, request: Request) -> list[Output]:
        """End a request wherever it is; its last slice says "abort". Unknown or finished: nothing."""
        seq = self._sequences.get(request)
        if seq is None:
            return []
        self.totals.aborted += 1
        return self._forget([(seq, self._committer.end(seq, "abort"))])

    # ---- one step

    def step(self) -> list[Output]:
        """One pass over the model: what was committed, per request, in the order of the plan."""
        self._draft()
        plan = self._begin(self.scheduler.schedule())
        if not plan:
            return self._forget(self._end_outgrown())
        return self._forget(self._commit(self._execute(plan)))

    def _begin(self, plan: list[Work]) -> list[Work]:
        """Start the draft source of whoever runs for the first time; preempt whoever asked for it as a test."""
        for work in plan:
            if work.seq.scheduled_at is None:
                work.seq.scheduled_at = time.monotonic()
                work.seq.drafter.start(work.seq.request.prompt)
        preempted = [work.seq for work in plan if wants_preemption(work)]
        for seq in preempted:
            self.scheduler.preempt(seq)
        return [work for work in plan if work.seq not in preempted] if preempted else plan

    def _draft(self) -> None:
        """Ask every decoding sequence's source for a draft, and keep as much of them all as pays."""
        running = self.scheduler.running
        decoding = [seq for seq in running if seq.decoding]
        budget = self.config.max_batch_tokens if len(decoding) == len(running) else self.config.max_batch_tokens // 2
        share = budget // max(1, len(decoding)) - 1
        drafts = [self._propose(seq, share) for seq in decoding]
        drafts = self.exits.draft(decoding, drafts, [self._room(seq, share) for seq in decoding])
        lengths = spend([draft.probs for draft in drafts], len(decoding), self.costs)
        for seq, draft, length in zip(decoding, drafts, lengths, strict=True):
            seq.draft = draft.trim(max(length, draft.least))
        self.exits.prune(decoding)

    def _propose(self, seq: Sequence, share: int) -> Draft:
        limit = min(self.config.max_draft_len, self._room(seq, share))
        try:
            return seq.drafter.propose(limit) if limit > 0 else EMPTY
        except Exception:  # drafts are free to be wrong, so a source that fails costs speed and no request
            logger.exception("request %s goes on without drafts", seq.request.id)
            seq.drafter = NoDrafter()
            return EMPTY

    def _room(self, seq: Sequence, share: int) -> int:
        """The pass itself yields one token, so the draft needs at most one less than what may still come."""
        return min(share, seq.max_len - len(seq.tokens) - 1)

    def _execute(self, plan: list[Work]) -> list[Verified | Failed]:
        """Run the plan. When it fails, run each work alone, so that only the one at fault is lost: by the law the
        others get the same tokens as together."""
        try:
            return list(self._pass(plan))
        except Exception as error:
            if len(plan) == 1:
                return [Failed(plan[0], self._blame(plan[0].seq, error))]
        return [result for work in plan for result in self._execute([work])]

    def _pass(self, plan: list[Work]) -> list[Verified]:
        inject_before(plan)
        self.totals.iteration_tokens += sum(work.num_tokens for work in plan)
        logits = self._runner.execute(plan)
        inject_nan(plan, logits)
        return self._verifier.verify(plan, logits)

    def _blame(self, seq: Sequence, error: Exception) -> str:
        if isinstance(error, BadLogits):
            self.totals.corrupted += 1
            self.scheduler.pool.forget(seq.blocks)
        logger.error("request %s failed in a step", seq.request.id, exc_info=error)
        return "invalid_value" if isinstance(error, AllTokensMasked | ConstraintFailed) else "internal_error"

    def _commit(self, results: list[Verified | Failed]) -> list[tuple[Sequence, TokenSlice]]:
        pieces = [(result.work.seq, self._commit_one(result)) for result in results]
        return [(seq, piece) for seq, piece in pieces if piece is not None]

    def _commit_one(self, result: Verified | Failed) -> TokenSlice | None:
        seq, code = result.work.seq, "internal_error"
        if isinstance(result, Failed):
            code = result.code
        else:
            try:
                self.exits.learn(result)
                return self._committer.commit(result)
            except Exception:  # a stop check, a grammar or a draft source; the neighbours' tokens are right
                logger.exception("request %s failed while its tokens were committed", seq.request.id)
        return replace(self._committer.end(seq, "error"), error_code=code)

    def _end_outgrown(self) -> list[tuple[Sequence, TokenSlice]]:
        """Nothing could be planned: the only running sequence has outgrown the whole pool."""
        outgrown = [seq for seq in self.scheduler.running[:1] if self.scheduler.outgrown(seq)]
        return [(seq, self._committer.end(seq, "length")) for seq in outgrown]

    def _forget(self, pieces: list[tuple[Sequence, TokenSlice]]) -> list[Output]:
        for seq, piece in pieces:
            if piece.finish is not None:
                del self._sequences[seq.request]
        return [(seq.request, piece) for seq, piece in pieces]

    def fail_all(self) -> list[Output]:
        """After an error outside any one sequence's work: end everything that runs, keep what waits."""
        pieces = [(seq, self._committer.end(seq, "error")) for seq in list(self.scheduler.running)]
        return self._forget([(seq, replace(piece, error_code="internal_error")) for seq, piece in pieces])

    # ---- around it

    def reset_caches(self) -> None:
        """Forget cached prefixes and the shared suffix store."""
        self.scheduler.pool.clear_cache()
        for seq in self.scheduler.running:
            seq.num_remembered = len(seq.blocks)
        self.stores.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError when any structure contradicts another."""
        self.scheduler.check_integrity()
        self.stores.check_integrity()

    def counters(self) -> EngineCounters:
        """A snapshot for /metrics."""
        scheduler, totals, pool = self.scheduler, self.totals, self.scheduler.pool
        return EngineCounters(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_blocks_total=pool.num_blocks,
            kv_blocks_used=pool.num_held,
            kv_blocks_cached=pool.num_cached,
            prompt_tokens=totals.prompt_tokens,
            generation_tokens=totals.generation_tokens,
            prompt_tokens_cached=totals.prompt_tokens_cached,
            prefix_cache_queries=scheduler.prefix_queries,
            prefix_cache_hits=scheduler.prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            aborted=totals.aborted,
            corrupted=totals.corrupted,
            target_passes=totals.target_passes,
            iteration_tokens=totals.iteration_tokens,
            suffix_store_tokens=self.stores.num_tokens,
            exits_given_up=totals.exits_given_up,
            spec={source: replace(stats) for source, stats in totals.spec.items()},
            accepted_per_pos=tuple(totals.accepted_per_pos),
        )

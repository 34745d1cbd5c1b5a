"""The engine: step() is draft, schedule, execute, commit. Knows no thread, no text and no HTTP."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from verdraft.kernels.chooser import choose_contenders, choose_philox
from verdraft.kernels.sampling import AllTokensMasked, BadLogits
from verdraft.model.eagle import EagleHead
from verdraft.model.exit_head import Exits
from verdraft.model.transformer import Transformer
from verdraft.scheduler.commit import Committer
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.costs import measure_costs
from verdraft.scheduler.counters import EngineCounters, Totals
from verdraft.scheduler.drafting import Drafting
from verdraft.scheduler.eagle import EagleDrafter
from verdraft.scheduler.errors import ContextTooLong
from verdraft.scheduler.exits import ExitDrafter
from verdraft.scheduler.faults import inject_before, inject_nan, wants_preemption
from verdraft.scheduler.guarded import GuardedDrafter
from verdraft.scheduler.outputs import TokenSlice
from verdraft.scheduler.plan import Work
from verdraft.scheduler.request import Mode, Request
from verdraft.scheduler.runner import Runner
from verdraft.scheduler.scheduler import Scheduler
from verdraft.scheduler.sequence import Sequence
from verdraft.scheduler.verifier import Failed, Law, Verified, Verifier
from verdraft.spec.constraint import ConstraintFailed
from verdraft.spec.draft import Drafter
from verdraft.spec.trials import Trials

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
        eagle: EagleHead | None = None,
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.totals = Totals()
        self.passed_at = 0.0  # time.monotonic() seconds, when the model last computed something
        pool = model.new_pool(config.num_blocks, config.block_size)
        taps = eagle.config.aux_layers if eagle else ()
        self._runner = Runner(model, pool, config.block_size, exits.bounds(model.config.num_layers), taps)
        law = Law(tuple(sorted(config.eos_token_ids)), choose_philox(), choose_contenders())
        self._verifier = Verifier(law)
        trials = Trials()
        self.drafting = Drafting(
            self.scheduler,
            ExitDrafter(exits, self._runner, law, self.scheduler, trials),
            EagleDrafter(eagle, self._runner, law, self.scheduler) if eagle else None,
            trials,
        )
        self._committer = Committer(self.scheduler, self.totals, config.eos_token_ids)
        self._make_drafter = drafter_factory or self.drafting.drafter
        self._sequences: dict[Request, Sequence] = {}
        self._order = 0

    def measure(self) -> None:
        """Learn what a pass costs here, so that drafts are no longer than pays; before the first request."""
        assert not self._sequences
        costs = measure_costs(self._runner, self.config.max_context)
        self.drafting.measure(costs)
        logger.info("a pass costs %s", ", ".join(f"{1e3 * s:.1f} ms for {n}" for n, s in costs.points()))

    @property
    def modes(self) -> tuple[Mode, ...]:
        """What a request's `speculation` may ask for."""
        return self.drafting.modes

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
        seq = Sequence(
            request,
            self._order,
            GuardedDrafter(self._make_drafter(request), request.id),
            num_segments=self._runner.num_segments,
            max_len=len(request.prompt) + (room if wanted is None else min(wanted, room)),
            leader=self._sequences.get(leader) if leader else None,
        )
        self.drafting.prepare(seq)
        self.scheduler.add(seq)
        self._sequences[request] = seq

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
        self.drafting.draft()
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
        passed = self._runner.execute(plan)
        self.passed_at = time.monotonic()
        inject_nan(plan, passed.logits)
        results = self._verifier.verify(plan, passed.logits)
        self._runner.straighten(results)
        self.drafting.watch(results, passed.taps)
        return results

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
                self.drafting.learn(result)
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
        """After an error outside any one sequence's work: end everything that runs, or that waits when nothing runs."""
        failed = list(self.scheduler.running) or list(self.scheduler.waiting)
        pieces = [(seq, self._committer.end(seq, "error")) for seq in failed]
        return self._forget([(seq, replace(piece, error_code="internal_error")) for seq, piece in pieces])

    # ---- around it

    def reset_caches(self) -> None:
        """Forget cached prefixes and the shared suffix store."""
        self.scheduler.pool.clear_cache()
        for seq in self.scheduler.running:
            seq.num_remembered = len(seq.blocks)
        self.drafting.stores.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError when any structure contradicts another."""
        self.scheduler.check_integrity()
        self.drafting.stores.check_integrity()

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
            suffix_store_tokens=self.drafting.stores.num_tokens,
            exits_given_up=self.drafting.exits.num_given_up,
            spec={
                source: replace(stats, accepted_per_pos=[*stats.accepted_per_pos])
                for source, stats in totals.spec.items()
            },
            predictor=replace(self.drafting.estimates.counts),
        )

"""The engine: step() is draft, schedule, execute, commit. Knows no thread, no text and no HTTP."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from verdraft.kernels.chooser import choose_contenders, choose_philox
from verdraft.model.eagle import EagleHead
from verdraft.model.exit_head import Exits
from verdraft.model.transformer import Transformer
from verdraft.scheduler.ahead import Lookahead, as_if_committed, brings_one_token, is_foreseeable
from verdraft.scheduler.commit import Committer
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.costs import measure_costs, measure_reading
from verdraft.scheduler.counters import EngineCounters, Totals
from verdraft.scheduler.device import Device, device_of
from verdraft.scheduler.drafting import Drafting
from verdraft.scheduler.eagle import EagleDrafter
from verdraft.scheduler.errors import ContextTooLong
from verdraft.scheduler.exits import ExitDrafter
from verdraft.scheduler.faults import wants_preemption
from verdraft.scheduler.guarded import GuardedDrafter
from verdraft.scheduler.outputs import TokenSlice
from verdraft.scheduler.passes import Flight, Passes
from verdraft.scheduler.plan import Work
from verdraft.scheduler.request import Mode, Request
from verdraft.scheduler.runner import Runner
from verdraft.scheduler.scheduler import Scheduler
from verdraft.scheduler.sequence import Sequence
from verdraft.scheduler.verifier import Failed, Law, Verified, Verifier
from verdraft.spec.draft import Drafter
from verdraft.spec.trials import Trials

logger = logging.getLogger("verdraft.engine")

Output = tuple[Request, TokenSlice]
DrafterFactory = Callable[[Request], Drafter]
NO_EXITS = Exits()


class Engine:
    """Everything between token ids in and token ids out. One thread at a time may call it.

    `device` is where the model is, unless told otherwise; on one that computes by itself, a pass is under way between
    two steps.
    """

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        drafter_factory: DrafterFactory | None = None,
        exits: Exits = NO_EXITS,
        eagle: EagleHead | None = None,
        device: Device | None = None,
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.totals = Totals()
        pool = model.new_pool(config.num_blocks, config.block_size)
        taps = eagle.config.aux_layers if eagle else ()
        self._device = device or device_of(model.device)
        bounds = exits.bounds(model.config.num_layers)
        eos = tuple(sorted(config.eos_token_ids))
        self._runner = Runner(model, pool, config.block_size, bounds, taps, self._device, eos)
        law = Law(eos, choose_philox(), choose_contenders())
        trials = Trials()
        self.drafting = Drafting(
            self.scheduler,
            ExitDrafter(exits, self._runner, law, self.scheduler, trials),
            EagleDrafter(eagle, self._runner, law, self.scheduler) if eagle else None,
            trials,
        )
        self._lookahead = Lookahead(self.scheduler, self.drafting)
        self._passes = Passes(self._runner, Verifier(law), self.drafting, self.totals, self.scheduler.pool)
        self._committer = Committer(self.scheduler, self.totals, config.eos_token_ids)
        self._make_drafter = drafter_factory or self.drafting.drafter
        self._sequences: dict[Request, Sequence] = {}
        self._order = 0
        self._flights: deque[Flight] = deque()  # passes under way, one behind the other
        self._outputs: list[Output] = []  # that nobody has taken yet
        self._ended: list[Sequence] = []  # whose draft sources have not stopped

    def measure(self) -> None:
        """Learn what a pass costs here, so that drafts are no longer than pays; before the first request."""
        assert not self._sequences
        self._runner.prepare()
        costs = measure_costs(self._runner, self.config.max_context)
        self.drafting.measure(costs)
        self.drafting.reading = reading = measure_reading(self._runner, self.config.max_context)
        points = ", ".join(f"{1e3 * s:.1f} ms for {n}" for n, s in costs.points())
        logger.info("a pass costs %s, and %.1f us a token of more context", points, 1e6 * reading.sequence)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """What a request's `speculation` may ask for."""
        return self.drafting.modes

    @property
    def passed_at(self) -> float:
        """time.monotonic() seconds, when the model last computed something."""
        return self._passes.passed_at

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
        seq.is_foreseeable = is_foreseeable(seq)
        self.scheduler.add(seq)
        self._sequences[request] = seq

    def abort(self, request: Request) -> list[Output]:
        """End a request wherever it is; its last slice says "abort". Unknown or finished: nothing."""
        seq = self._sequences.get(request)
        if seq is None:
            return []
        self.totals.aborted += 1
        self._emit([(seq, self._committer.end(seq, "abort"))])
        self._stop_drafters()
        return self._take_outputs()

    # ---- one step

    def step(self) -> list[Output]:
        """Draft, schedule, execute, commit: what was committed, per request, in the order of the plan.

        Where the device computes by itself, that is the pass of the step before, and the next one is under way when
        anybody hears of it; it waits for the host in between only where drafts depend on what the one before found.
        """
        if self._device.overlaps:
            self._run_ahead()
            self._commit()
        if not self._flights:
            self._run()
        if not self._device.overlaps:
            self._commit()
        self._stop_drafters()
        return self._take_outputs()

    def _run(self) -> None:
        if not self._device.overlaps or self._lookahead.waits():
            self.drafting.draft()
        else:
            self.drafting.skip()
        plan = self._begin(self.scheduler.schedule())
        if plan:
            self._flights.append(self._passes.begin(plan))
        else:
            self._emit(self._end_outgrown())

    def _run_ahead(self) -> None:
        """Begin the pass behind the one under way, if what that one finds decides nothing but tokens."""
        if not self._flights or not self._flights[0].begun:  # of one that could not begin there are none to take
            return
        if self._lookahead.waits() or not brings_one_token(self._flights[0].plan):
            return
        with as_if_committed(self._flights[0].plan):
            if self.scheduler.num_unpromised >= 0:  # nobody has to give way
                plan = self._begin(self.scheduler.schedule())
                if plan:
                    self._flights.append(self._passes.begin(plan, self._flights[0]))

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

    def _commit(self) -> None:
        """Wait for the pass that is under way, if one is, and commit what it found; nothing of requests that have ended
        meanwhile."""
        if not self._flights:
            self._lookahead.pause()
            return
        flight = self._flights.popleft()
        results = [result for result in self._passes.end(flight) if not result.work.seq.finished]
        if flight.failed and self._flights:
            self._passes.drop(self._flights.popleft())
        if self._device.overlaps:
            self._lookahead.learn(flight, results)
        pieces = [(result.work.seq, self._commit_one(result)) for result in results]
        self._emit([(seq, piece) for seq, piece in pieces if piece is not None])

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
        return self._committer.end(seq, "error")._replace(error_code=code)

    def _end_outgrown(self) -> list[tuple[Sequence, TokenSlice]]:
        """Nothing could be planned: the only running sequence has outgrown the whole pool."""
        outgrown = [seq for seq in self.scheduler.running[:1] if self.scheduler.outgrown(seq)]
        return [(seq, self._committer.end(seq, "length")) for seq in outgrown]

    def _emit(self, pieces: list[tuple[Sequence, TokenSlice]]) -> None:
        """Somebody will take these; they are safe from whatever fails meanwhile."""
        for seq, piece in pieces:
            if piece.finish is not None:
                del self._sequences[seq.request]
            if piece.finish not in (None, "error") and seq.scheduled_at is not None:
                self._ended.append(seq)
        self._outputs += [(seq.request, piece) for seq, piece in pieces]

    def _take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _stop_drafters(self) -> None:
        """What ended sequences leave to later drafts: work that no plan waits for."""
        while self._ended:
            self._ended.pop().drafter.stop()

    def fail_all(self) -> list[Output]:
        """After an error outside any one sequence's work: end everything that runs, or that waits when nothing runs."""
        failed = list(self.scheduler.running) or list(self.scheduler.waiting)
        pieces = [(seq, self._committer.end(seq, "error")) for seq in failed]
        self._emit([(seq, piece._replace(error_code="internal_error")) for seq, piece in pieces])
        return self._take_outputs()

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
            near_ties=totals.margins.num_near,
            spec={
                source: replace(stats, accepted_per_pos=[*stats.accepted_per_pos])
                for source, stats in totals.spec.items()
            },
            predictor=replace(self.drafting.estimates.counts),
        )

"""What the engine counts, and the snapshot of it that leaves the engine's thread."""

from dataclasses import dataclass, field

from verdraft.scheduler.estimates import PredictorCounts
from verdraft.scheduler.outputs import Margins, SourceStats, SpecStats
from verdraft.spec.draft import SOURCES, Source


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Totals since the start, and gauges of this moment. Plain values, safe to keep."""

    num_running: int
    num_waiting: int
    kv_blocks_total: int
    kv_blocks_used: int  # referenced by live sequences
    kv_blocks_cached: int
    prompt_tokens: int
    generation_tokens: int
    prompt_tokens_cached: int
    prefix_cache_queries: int  # blocks looked up
    prefix_cache_hits: int  # blocks found
    num_preemptions: int
    aborted: int
    corrupted: int
    target_passes: int
    iteration_tokens: int
    suffix_store_tokens: int
    exits_given_up: int  # sequences whose exits agreed too seldom with the full model
    near_ties: int  # outputs.Margins
    spec: dict[Source, SourceStats]
    predictor: PredictorCounts


@dataclass(slots=True)
class Totals:
    """The engine's own running totals."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prompt_tokens_cached: int = 0
    aborted: int = 0
    corrupted: int = 0
    target_passes: int = 0
    iteration_tokens: int = 0
    margins: Margins = field(default_factory=Margins)
    # Every source from the start: a snapshot from another thread never meets a growing dict.
    spec: dict[Source, SourceStats] = field(default_factory=lambda: {source: SourceStats() for source in SOURCES})

    def count_draft(self, stats: SpecStats, source: Source, drafted: int, accepted: int) -> None:
        """One verified draft, for the engine and for the sequence's own report."""
        stats.num_steps += 1
        for sources in (self.spec, stats.sources):
            sources.setdefault(source, SourceStats()).count(drafted, accepted)

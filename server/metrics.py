"""Prometheus metrics (HTTP contract, section 10): one registry per application.

The engine's own counters are read when scraped; what only the server knows is counted here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from verdraft.scheduler.counters import EngineCounters
from verdraft.scheduler.estimates import PredictorCounts
from verdraft.scheduler.outputs import SourceStats, Summary
from verdraft.server.errors import ApiError
from verdraft.spec.draft import Source

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
FINISHED_REASONS = ("stop", "length", "tool_calls", "abort", "error")
SOURCES: tuple[Source, ...] = get_args(Source)
MAX_POSITIONS = 32  # accepted_per_pos beyond the last are summed into it, so that the series stay bounded

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

ERROR_CODES = (
    "array_above_max_length",
    "context_length_exceeded",
    "decimal_above_max_value",
    "decimal_below_min_value",
    "draining",
    "empty_array",
    "empty_string",
    "engine_dead",
    "engine_stuck",
    "integer_above_max_value",
    "integer_below_min_value",
    "internal_error",
    "invalid_api_key",
    "invalid_json",
    "invalid_type",
    "invalid_value",
    "loading",
    "method_not_allowed",
    "missing_required_parameter",
    "model_not_found",
    "not_found",
    "rate_limit_exceeded",
    "request_timeout",
    "request_too_large",
    "string_above_max_length",
    "unsupported_content_type",
    "unsupported_parameter",
)

# (name, help, counter or gauge, how to read it)
Reading = tuple[str, str, type[CounterMetricFamily | GaugeMetricFamily], Callable[[EngineCounters], float]]
READINGS: tuple[Reading, ...] = (
    ("num_requests_running", "sequences that are decoded or prefilled", GaugeMetricFamily, lambda c: c.num_running),
    ("num_requests_waiting", "sequences that wait for a place", GaugeMetricFamily, lambda c: c.num_waiting),
    (
        "kv_cache_usage_perc",
        "part of the KV pool that live requests hold, 0 to 1",
        GaugeMetricFamily,
        lambda c: c.kv_blocks_used / c.kv_blocks_total if c.kv_blocks_total else 0.0,
    ),
    ("kv_blocks_total", "blocks in the KV pool", GaugeMetricFamily, lambda c: c.kv_blocks_total),
    ("kv_blocks_cached", "blocks kept for later prompts", GaugeMetricFamily, lambda c: c.kv_blocks_cached),
    ("suffix_store_tokens", "tokens in the shared suffix store", GaugeMetricFamily, lambda c: c.suffix_store_tokens),
    ("prompt_tokens", "prompt tokens, cached ones too", CounterMetricFamily, lambda c: c.prompt_tokens),
    ("generation_tokens", "committed output tokens", CounterMetricFamily, lambda c: c.generation_tokens),
    (
        "prompt_tokens_cached",
        "prompt tokens taken from the prefix cache",
        CounterMetricFamily,
        lambda c: c.prompt_tokens_cached,
    ),
    ("prefix_cache_queries", "blocks looked up", CounterMetricFamily, lambda c: c.prefix_cache_queries),
    ("prefix_cache_hits", "blocks found", CounterMetricFamily, lambda c: c.prefix_cache_hits),
    ("num_preemptions", "sequences set back", CounterMetricFamily, lambda c: c.num_preemptions),
    ("corrupted_requests", "sequences whose logits were not numbers", CounterMetricFamily, lambda c: c.corrupted),
    ("target_forward_passes", "decode rows of the full model", CounterMetricFamily, lambda c: c.target_passes),
    (
        "spec_decode_exits_given_up",
        "sequences whose exits agreed too seldom with the full model",
        CounterMetricFamily,
        lambda c: c.exits_given_up,
    ),
    ("near_ties", "tokens that other low bits might have changed", CounterMetricFamily, lambda c: c.near_ties),
    ("iteration_tokens", "tokens that the engine's steps computed", CounterMetricFamily, lambda c: c.iteration_tokens),
)

PREDICTOR_READINGS: tuple[tuple[str, str, Callable[[PredictorCounts], float]], ...] = (
    ("states", "suffix drafts whose fate is known, verified or not", lambda p: p.num_states),
    ("predicted_tokens", "tokens of them that were expected to be accepted", lambda p: p.predicted_tokens),
    ("accepted_tokens", "tokens of them that the committed text begins with", lambda p: p.accepted_tokens),
    ("error_tokens", "differences between the two, without their signs", lambda p: p.error_tokens),
    ("high_predicted", "drafts of which more than six tokens were expected", lambda p: p.high_predicted),
    ("high_came", "drafts of which at least six tokens were right", lambda p: p.high_came),
    ("high_hits", "drafts of both kinds", lambda p: p.high_hits),
)

SPEC_READINGS: tuple[tuple[str, str, Callable[[SourceStats], int]], ...] = (
    ("spec_decode_num_drafts", "drafts that the full model verified", lambda s: s.num_drafts),
    ("spec_decode_num_draft_tokens", "their tokens", lambda s: s.num_draft_tokens),
    ("spec_decode_num_accepted_tokens", "their accepted tokens", lambda s: s.num_accepted_tokens),
)

IDLE = EngineCounters(
    num_running=0,
    num_waiting=0,
    kv_blocks_total=0,
    kv_blocks_used=0,
    kv_blocks_cached=0,
    prompt_tokens=0,
    generation_tokens=0,
    prompt_tokens_cached=0,
    prefix_cache_queries=0,
    prefix_cache_hits=0,
    num_preemptions=0,
    aborted=0,
    corrupted=0,
    target_passes=0,
    iteration_tokens=0,
    suffix_store_tokens=0,
    exits_given_up=0,
    near_ties=0,
    spec={},
    predictor=PredictorCounts(),
)


class EngineCollector(Collector):
    """Reads the engine's counters at every scrape; zeros while the model loads."""

    def __init__(self, read: Callable[[], EngineCounters | None]) -> None:
        self.read = read

    def collect(self) -> Iterator[Metric]:
        counters = self.read() or IDLE
        for name, text, family, value in READINGS:
            yield family(f"verdraft_{name}", text, value=value(counters))
        for name, text, part in SPEC_READINGS:
            by_source = CounterMetricFamily(f"verdraft_{name}", text, labels=["source"])
            for source in SOURCES:
                by_source.add_metric([source], part(counters.spec.get(source, SourceStats())))
            yield by_source
        for name, text, read in PREDICTOR_READINGS:
            yield CounterMetricFamily(f"verdraft_predictor_{name}", text, value=read(counters.predictor))
        yield from _per_position({source: stats.accepted_per_pos for source, stats in counters.spec.items()})


def _per_position(accepted: Mapping[Source, Sequence[int]]) -> Iterator[Metric]:
    """By place in the draft, of all sources together and of each."""
    name, text = "verdraft_spec_decode_num_accepted_tokens_per", "accepted draft tokens by their place in the draft"
    family = CounterMetricFamily(f"{name}_pos", text, labels=["position"])
    by_source = CounterMetricFamily(f"{name}_source_pos", f"{text} and its source", labels=["source", "position"])
    for position in range(MAX_POSITIONS):
        places = slice(position, None if position == MAX_POSITIONS - 1 else position + 1)
        counts = [sum(accepted.get(source, ())[places]) for source in SOURCES]
        family.add_metric([str(position)], sum(counts))
        for source, count in zip(SOURCES, counts, strict=True):
            by_source.add_metric([source, str(position)], count)
    yield family
    yield by_source


class Metrics:
    """Everything on /metrics. `read_engine` returns None until there is an engine."""

    def __init__(
        self, read_engine: Callable[[], EngineCounters | None], num_grammars: Callable[[], int] = lambda: 0
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(read_engine))
        ProcessCollector(registry=self.registry)
        grammars = Gauge("verdraft_grammar_cache_entries", "compiled grammars kept", registry=self.registry)
        grammars.set_function(num_grammars)
        self._finished = self._counter("request_success", "requests that ran, by how they ended", "finished_reason")
        self._errors = self._counter("request_errors", "error answers and error events", "code")
        self.aborted = self._counter("requests_aborted", "requests whose client went away or that were aborted")
        self._rejected = self._counter("requests_rejected", "requests that found the queue full")
        for reason in FINISHED_REASONS:
            self._finished.labels(reason)
        for code in ERROR_CODES:
            self._errors.labels(code)
        self._make_histograms()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"verdraft_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(f"verdraft_{name}", text, registry=self.registry, buckets=buckets)

    def _make_histograms(self) -> None:
        self._first_token = self._histogram("time_to_first_token_seconds", "arrival to first token")
        self._between = self._histogram("inter_token_latency_seconds", "time between tokens after the first")
        self._per_token = self._histogram("request_time_per_output_token_seconds", "decode time per token")
        self._whole = self._histogram("e2e_request_latency_seconds", "arrival to last token")
        self._queued = self._histogram("request_queue_time_seconds", "arrival to first step")
        self._prefill = self._histogram("request_prefill_time_seconds", "first step to first token")
        self._decode = self._histogram("request_decode_time_seconds", "first to last token")
        self._prompt_len = self._histogram("request_prompt_tokens", "prompt tokens of a request", TOKENS)
        self._output_len = self._histogram("request_generation_tokens", "output tokens of a sequence", TOKENS)

    def expose(self) -> bytes:
        """The text format, version 0.0.4."""
        return generate_latest(self.registry)

    def error(self, error: ApiError) -> None:
        """An error was sent. Codes outside the contract would make the series unbounded."""
        self._errors.labels(error.code if error.code in ERROR_CODES else "internal_error").inc()
        if error.status == 429:
            self._rejected.inc()

    def finished(self, reason: str) -> None:
        """A request that ran has ended."""
        self._finished.labels(reason).inc()

    def tokens_after(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` arrived together, `seconds` after the one before them."""
        for _ in range(num_tokens):
            self._between.observe(seconds / num_tokens)

    def prompt(self, num_tokens: int) -> None:
        """One prompt was admitted."""
        self._prompt_len.observe(num_tokens)

    def sequence(self, summary: Summary) -> None:
        """One choice has ended; phases that it never reached are left out."""
        timing = summary.timing
        self._output_len.observe(summary.num_output_tokens)
        if timing.scheduled is not None:
            self._queued.observe(timing.scheduled - timing.arrived)
        if timing.finished is not None:
            self._whole.observe(timing.finished - timing.arrived)
        if timing.scheduled is not None and timing.first_token is not None:
            self._first_token.observe(timing.first_token - timing.arrived)
            self._prefill.observe(timing.first_token - timing.scheduled)
        if timing.first_token is not None and timing.finished is not None:
            decode = timing.finished - timing.first_token
            self._decode.observe(decode)
            if summary.num_output_tokens > 1:
                self._per_token.observe(decode / (summary.num_output_tokens - 1))

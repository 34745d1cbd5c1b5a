"""The text that Prometheus reads."""

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from verdraft.scheduler.estimates import PredictorCounts
from verdraft.scheduler.outputs import SourceStats, SpecStats, Summary, Timing
from verdraft.server.errors import ApiError, queue_full
from verdraft.server.metrics import ERROR_CODES, IDLE, MAX_POSITIONS, Metrics


def series(metrics: Metrics) -> dict[str, float]:
    text = metrics.expose().decode()
    rows = [row.rpartition(" ") for row in text.splitlines() if row and not row.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def test_everything_is_there_from_the_start() -> None:
    found = series(Metrics(lambda: None))
    assert found['verdraft_request_success_total{finished_reason="tool_calls"}'] == 0
    assert found['verdraft_spec_decode_num_accepted_tokens_total{source="grammar"}'] == 0
    assert found["verdraft_time_to_first_token_seconds_count"] == 0
    assert found['verdraft_e2e_request_latency_seconds_bucket{le="0.001"}'] == 0
    assert found['verdraft_e2e_request_latency_seconds_bucket{le="60.0"}'] == 0
    assert found["process_resident_memory_bytes"] > 0
    assert not any(name.partition("{")[0].endswith("_created") for name in found)


NAMES = {
    "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc kv_blocks_total kv_blocks_cached "
    "suffix_store_tokens grammar_cache_entries",
    "counter": "prompt_tokens generation_tokens prompt_tokens_cached prefix_cache_queries prefix_cache_hits "
    "num_preemptions request_success request_errors requests_aborted requests_rejected corrupted_requests "
    "spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens "
    "spec_decode_num_accepted_tokens_per_pos target_forward_passes iteration_tokens",
    "histogram": "time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds "
    "e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds "
    "request_decode_time_seconds request_prompt_tokens request_generation_tokens",
}


@pytest.mark.parametrize("kind", NAMES)
def test_every_name_of_the_contract_with_its_type(kind: str) -> None:
    families = {f.name: f for f in text_string_to_metric_families(Metrics(lambda: None).expose().decode())}
    for name in NAMES[kind].split():
        assert families[f"verdraft_{name}"].type == kind
        if name.endswith("_seconds"):
            bounds = [float(s.labels["le"]) for s in families[f"verdraft_{name}"].samples if "le" in s.labels]
            assert (bounds[0], bounds[-2]) == (0.001, 60)


def test_types() -> None:
    families = {f.name: f.type for f in text_string_to_metric_families(Metrics(lambda: None).expose().decode())}
    assert families["verdraft_kv_blocks_total"] == "gauge"
    assert families["verdraft_generation_tokens"] == "counter"
    assert families["verdraft_request_prompt_tokens"] == "histogram"


def test_engine_counters() -> None:
    counters = replace(
        IDLE,
        kv_blocks_total=10,
        kv_blocks_used=4,
        near_ties=3,
        spec={
            "suffix": SourceStats(1, 7, 5, [*range(MAX_POSITIONS + 3)]),
            "grammar": SourceStats(1, 2, 2, [1, 1]),
        },
        predictor=PredictorCounts(num_states=3, predicted_tokens=7.5, accepted_tokens=6, error_tokens=2.5, high_hits=1),
    )
    found = series(Metrics(lambda: counters))
    assert found["verdraft_kv_cache_usage_perc"] == 0.4
    assert found["verdraft_near_ties_total"] == 3
    assert found['verdraft_spec_decode_num_draft_tokens_total{source="suffix"}'] == 7
    assert found["verdraft_predictor_states_total"] == 3
    assert found["verdraft_predictor_predicted_tokens_total"] - found["verdraft_predictor_accepted_tokens_total"] == 1.5
    assert found["verdraft_predictor_error_tokens_total"] == 2.5
    assert found["verdraft_predictor_high_hits_total"] == 1
    positions = [v for n, v in found.items() if n.startswith("verdraft_spec_decode_num_accepted_tokens_per_pos")]
    assert len(positions) == MAX_POSITIONS
    assert sum(positions) == sum(range(MAX_POSITIONS + 3)) + 2
    of_grammar = 'verdraft_spec_decode_num_accepted_tokens_per_source_pos_total{position="%d",source="grammar"}'
    assert [found[of_grammar % position] for position in range(3)] == [1, 1, 0]


def test_errors_of_unknown_codes_add_no_series() -> None:
    metrics = Metrics(lambda: None)
    before = len(series(metrics))
    metrics.error(ApiError(418, "never_seen", "x"))
    metrics.error(queue_full())
    found = series(metrics)
    assert len(found) == before
    assert found['verdraft_request_errors_total{code="internal_error"}'] == 1
    assert found["verdraft_requests_rejected_total"] == 1
    assert len([n for n in found if n.startswith("verdraft_request_errors_total")]) == len(ERROR_CODES)


def test_histograms_of_a_sequence() -> None:
    metrics = Metrics(lambda: None)
    metrics.sequence(Summary(0, 5, SpecStats(), Timing(arrived=1.0, scheduled=2.0, first_token=4.0, finished=8.0)))
    metrics.sequence(Summary(0, 0, SpecStats(), Timing(arrived=1.0, finished=2.0)))  # never started
    metrics.tokens_after(0.4, 4)
    metrics.tokens_after(0.4, 0)
    found = series(metrics)
    assert found["verdraft_request_queue_time_seconds_sum"] == 1
    assert found["verdraft_request_prefill_time_seconds_sum"] == 2
    assert found["verdraft_request_decode_time_seconds_sum"] == 4
    assert found["verdraft_request_time_per_output_token_seconds_sum"] == 1
    assert found["verdraft_time_to_first_token_seconds_sum"] == 3
    assert found["verdraft_e2e_request_latency_seconds_count"] == 2
    assert found["verdraft_inter_token_latency_seconds_count"] == 4

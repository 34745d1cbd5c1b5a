"""Offline sampling parameters: bad ones are named before anything runs."""

from typing import Any

import pytest

from verdraft import SamplingParams
from verdraft.server.llm import OFFLINE_SETTINGS
from verdraft.server.settings import Settings


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": 3},
        {"temperature": True},
        {"repetition_penalty": float("inf")},
        {"top_p": 0},
        {"top_k": "x"},
        {"top_k": -2},
        {"top_k": 2**63},
        {"n": 0},
        {"n": 1.5},
        {"max_tokens": 0},
        {"max_tokens": 2.5},
        {"min_tokens": 3, "max_tokens": 2},
        {"logprobs": 2.5},
        {"seed": 2**63},
        {"seed": -(2**63) - 1},
        {"seed": "a"},
        {"seed": 1.5},
        {"logit_bias": {1: 100.5}},
        {"logit_bias": {1: "a"}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": [1]},
        {"stop": [""]},
        {"stop": 3},
    ],
)
def test_bad_params_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_the_bounds_themselves_are_fine() -> None:
    low = SamplingParams(seed=-(2**63), top_k=-1, logit_bias={1: -100}, temperature=0, min_tokens=0, n=1)
    most = {"seed": 2**63 - 1, "top_k": 2**63 - 1, "logit_bias": {1: 100}, "temperature": 2}
    high = SamplingParams(**most, min_tokens=2, max_tokens=2, stop="x")
    assert (low.seed, low.stops, high.stops) == (-(2**63), (), ("x",))


def test_offline_use_has_every_setting_that_changes_what_an_engine_does() -> None:
    only_served = {
        "model", "served_model_name", "host", "port", "api_key", "max_queue", "max_connections", "max_body_bytes",
        "learning", "suffix_cache", "request_timeout", "drain_timeout", "log_level", "log_format", "config",
    }  # fmt: skip
    assert set(Settings.model_fields) - only_served == set(OFFLINE_SETTINGS)

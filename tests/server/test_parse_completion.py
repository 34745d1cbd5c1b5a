"""What /v1/completions and the small endpoints accept, and what they say about the rest."""

from dataclasses import replace
from typing import Any

import pytest

from verdraft.scheduler.request import Fault
from verdraft.server.errors import ApiError
from verdraft.server.parse_completion import parse_abort, parse_completion, parse_detokenize, parse_tokenize
from verdraft.server.requests import CompletionRequest, Limits

INT64 = 2**63


def parse(limits: Limits, **body: Any) -> CompletionRequest:
    return parse_completion({"prompt": "x", **body}, limits)


def refused(limits: Limits, **body: Any) -> tuple[str | None, str | None]:
    """(param, code) of the 400."""
    with pytest.raises(ApiError) as error:
        parse(limits, **body)
    assert error.value.status == 400
    return error.value.param, error.value.code


def test_defaults(limits: Limits) -> None:
    request = parse(limits)
    options = request.options
    assert (request.model, request.prompts, request.echo) == ("demo/model", ("x",), False)
    assert (options.sampling.max_tokens, options.sampling.temperature, options.n) == (16, 1.0, 1)
    assert (options.prediction, options.cache_salt, options.speculation) == (None, "", "auto")
    assert options.sampling.logprobs is None


FIELDS = [
    "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "stop", "seed", "frequency_penalty",
    "presence_penalty", "logit_bias", "logprobs", "user", "top_k", "min_p", "repetition_penalty", "min_tokens",
    "ignore_eos", "stop_token_ids", "cache_salt", "priority", "return_token_ids", "speculation", "model", "echo",
    "return_speculation", "prediction", "suffix", "best_of", "metadata", "audio", "store", "modalities", "fault",
]  # fmt: skip


def test_null_is_absent(limits: Limits) -> None:
    assert parse(limits, **dict.fromkeys(FIELDS)) == parse(limits)


def test_unknown_fields_are_ignored(limits: Limits) -> None:
    assert parse(limits, magic=True, chat_template_kwargs={}, fault={"kind": "raise"}) == parse(limits)


WRONG: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, "1", [], True],
    "top_p": [0, -0.5, 1.0001, "1", {}],
    "n": [0, -1, 129, 10**6, 1.5, "2", True],
    "max_tokens": [-1, 0, 1.5, "5", True, []],
    "seed": [INT64, 2 * INT64, 1e30, -INT64 - 1, 1.5, "7", True],
    "frequency_penalty": [2.01, -2.01, "0"],
    "presence_penalty": [2.01, -2.01, "x"],
    "repetition_penalty": [0, -1, "1", 10**400],
    "top_k": [-2, 2.5, "5", True],
    "min_p": [-0.1, 1.1, "0"],
    "min_tokens": [-1, 1.5, "3", 17],
    "ignore_eos": ["yes", 1, 0],
    "stop": ["", [""], ["x", ""], [None], [1], {}, 5, True, ["x"] * 17, "s" * 1025, [["x"]]],
    "stop_token_ids": [[-1], [1000], [1.5], ["1"], [True], [None], 5, "x"],
    "logit_bias": [
        {"4": 101}, {"4": -101}, {"1000": 1}, {"-1": 1}, {"abc": 1}, {"4": "5"}, {"4": None}, {"4": True}, [], "x",
        {"04": 1}, {" 4": 1}, {"\u0664": 1}, {"9" * 5000: 1}, {"": 1},
    ],
    "stream": ["true", 1],
    "stream_options": [{"include_usage": True}, {}, []],
    "cache_salt": ["", 5, []],
    "return_token_ids": ["yes", 1],
    "speculation": ["magic", "", 1, True, ["auto"], "hispec"],
    "return_speculation": ["yes", 1],
    "priority": [1.5, "high"],
    "logprobs": [-1, 6, True, "1"],
    "echo": ["yes", 1],
    "metadata": ["x", {"k": 1}, {"k" * 65: "v"}, {"k": "v" * 513}, {str(i): "v" for i in range(17)}],
    "suffix": ["end", 5],
    "best_of": [2, "1"],
    "audio": [{"voice": "alloy"}],
    "modalities": [["text", "audio"], "text"],
    "web_search_options": [{}],
    "store": [True, "no"],
    "functions": [[{"name": "f"}]],
    "function_call": ["auto"],
    "model": [5, True, ["a"], {}],
    "prompt": [
        "", [], [[]], ["hi", ""], [""], [[5], []], None, 5, True, {}, ["hi", None], ["hi", 5], [[5], "hi"], [-1],
        [1000], [1.5], [True], [None], [[5, 6], [5, 1000]], [[[5]]], ["a"] * 129, [2**70],
    ],
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in WRONG for value in WRONG[field]])
def test_refused_values(limits: Limits, field: str, value: Any) -> None:
    param, code = refused(limits, **{field: value})
    assert param == field
    assert code


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"temperature": 200}, "decimal_above_max_value"),
        ({"temperature": -1}, "decimal_below_min_value"),
        ({"top_p": 0}, "decimal_below_min_value"),
        ({"n": 0}, "integer_below_min_value"),
        ({"n": 129}, "integer_above_max_value"),
        ({"temperature": "x"}, "invalid_type"),
        ({"stop": ["x"] * 17}, "array_above_max_length"),
        ({"stop": ""}, "empty_string"),
        ({"stop": "s" * 1025}, "string_above_max_length"),
        ({"stop_token_ids": [1000]}, "invalid_value"),
        ({"speculation": "magic"}, "invalid_value"),
        ({"prompt": None}, "missing_required_parameter"),
        ({"prompt": []}, "empty_array"),
        ({"prompt": ["a"] * 65, "n": 2}, "array_above_max_length"),
        ({"store": True}, "unsupported_parameter"),
    ],
)
def test_codes(limits: Limits, body: dict[str, Any], code: str) -> None:
    assert refused(limits, **body)[1] == code


EDGES: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 2}, {"top_p": 1e-9}, {"top_p": 1}, {"top_k": -1}, {"top_k": 10**9},
    {"min_p": 1}, {"seed": INT64 - 1}, {"seed": -INT64}, {"frequency_penalty": 2}, {"repetition_penalty": 1e-3},
    {"stop": []}, {"stop": ["q"] * 16}, {"stop": "s" * 1024}, {"stop_token_ids": []}, {"logit_bias": {}},
    {"max_tokens": 10**30},
    {"logit_bias": {"0": -100, "999": 100}}, {"min_tokens": 16}, {"priority": -5}, {"cache_salt": "x"},
    {"modalities": ["text"], "store": False, "suffix": "", "best_of": 2, "n": 2, "functions": [], "user": "u"},
    {"metadata": {"team": "a"}}, {"prompt": ["a"] * 64, "n": 2}, {"stream": True, "stream_options": {}},
]  # fmt: skip


@pytest.mark.parametrize("body", EDGES, ids=lambda body: str(body)[:40])
def test_accepted_edges(limits: Limits, body: dict[str, Any]) -> None:
    assert parse(limits, **body).options.n in (1, 2)


def test_values_arrive(limits: Limits) -> None:
    request = parse(
        limits, prompt=[[1, 2], [3]], temperature=1, top_k=-1, seed=-1, stop="END", stop_token_ids=[7, 7],
        logit_bias={"4": 5}, stream=True, stream_options={"include_usage": True}, n=3, logprobs=2, echo=True,
        priority=-2,
    )  # fmt: skip
    options, sampling = request.options, request.options.sampling
    assert request.prompts == ((1, 2), (3,))
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (1.0, 0, -1)
    assert (sampling.stop_token_ids, sampling.logit_bias) == (frozenset([7]), {4: 5.0})
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, 2)
    assert (options.stop, options.include_usage, options.n, options.priority) == (("END",), True, 3, -2)


def test_all_prompt_forms(limits: Limits) -> None:
    assert parse(limits, prompt=["a", "b"]).prompts == ("a", "b")
    assert parse(limits, prompt=[5, 6]).prompts == ((5, 6),)


def test_zero_tokens_only_with_echo(limits: Limits) -> None:
    assert parse(limits, max_tokens=0, echo=True).options.sampling.max_tokens == 0
    assert refused(limits, max_tokens=0, echo=False) == ("max_tokens", "integer_below_min_value")


def test_min_tokens_is_at_most_max_tokens(limits: Limits) -> None:
    assert refused(limits, max_tokens=3, min_tokens=4)[0] == "min_tokens"
    assert parse(limits, max_tokens=4, min_tokens=4).options.sampling.min_tokens == 4


def test_unknown_model(limits: Limits) -> None:
    with pytest.raises(ApiError) as error:
        parse(limits, model="gpt-nonexistent")
    assert (error.value.status, error.value.code, error.value.param) == (404, "model_not_found", "model")
    assert "gpt-nonexistent" in error.value.message


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": None, "content": "x"}, "prediction.type"),
        ({"type": ["content"], "content": "x"}, "prediction.type"),
        ({"content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": []}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text"),
        ("x", "prediction"),
        ([], "prediction"),
        (True, "prediction"),
    ],
)
def test_bad_prediction(limits: Limits, value: Any, param: str) -> None:
    assert refused(limits, prediction=value)[0] == param


def test_prediction(limits: Limits) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse(limits, prediction={"type": "content", "content": parts}).options.prediction == "ab"
    assert parse(limits, prediction={"type": "content", "content": ""}).options.prediction == ""


def test_a_fault_is_read_only_with_test_hooks(limits: Limits) -> None:
    hooked = replace(limits, test_hooks=True)
    fault = {"kind": "freeze", "after_tokens": 2, "seconds": 1.5}
    assert parse(hooked, fault=fault).options.fault == Fault("freeze", 2, 1.5)
    assert parse(limits, fault=fault).options.fault is None
    for wrong, param in (({"kind": "x"}, "fault.kind"), ({"kind": "nan", "after_tokens": -1}, "fault.after_tokens")):
        assert refused(hooked, fault=wrong)[0] == param


def test_tokenize(limits: Limits) -> None:
    assert parse_tokenize({"prompt": ""}, limits).prompt == ""
    chat = parse_tokenize({"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}, limits).chat
    assert chat is not None
    assert not chat.add_generation_prompt


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"messages": "x"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "prompt": "x"}, "prompt"),
    ],
)
def test_bad_tokenize(limits: Limits, body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        parse_tokenize(body, limits)
    assert (error.value.status, error.value.param) == (400, param)


def test_detokenize_and_abort(limits: Limits) -> None:
    assert parse_detokenize({"tokens": [0, 999]}, limits) == (0, 999)
    assert parse_detokenize({"tokens": []}, limits) == ()
    assert parse_abort({"id": "cmpl-1"}) == "cmpl-1"
    for tokens in ([-1], [1000], [2**63], [1.5], ["1"], [None], "abc", None):
        with pytest.raises(ApiError) as error:
            parse_detokenize({"tokens": tokens}, limits)
        assert error.value.param == "tokens"
    with pytest.raises(ApiError, match="'id'"):
        parse_abort({})

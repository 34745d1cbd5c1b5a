"""The OpenAPI description agrees with the parsers, field by field and in both directions, and names every route."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import HealthCheck
from jsonschema import Draft202012Validator

from verdraft.scheduler.request import Mode
from verdraft.server.app import build_app
from verdraft.server.errors import ApiError
from verdraft.server.lifecycle import Lifecycle
from verdraft.server.openapi import description
from verdraft.server.parse_chat import parse_chat
from verdraft.server.parse_completion import parse_abort, parse_completion, parse_detokenize, parse_tokenize
from verdraft.server.parse_messages import parse_messages_body
from verdraft.server.parse_responses import parse_responses_body
from verdraft.server.requests import Limits
from verdraft.server.service import Service
from verdraft.server.settings import Settings
from verdraft.server.tracing import NoTracer

LIMITS = Limits(model="x", vocab_size=10**12, max_model_len=100)
MESSAGE = {"role": "user", "content": "hey"}
PARSERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "/v1/chat/completions": (parse_chat, {"messages": [MESSAGE]}),
    "/v1/completions": (parse_completion, {"prompt": "hey"}),
    "/v1/responses": (parse_responses_body, {"input": "hey"}),
    "/v1/messages": (parse_messages_body, {"messages": [MESSAGE], "max_tokens": 5}),
    "/tokenize": (parse_tokenize, {"prompt": "hey"}),
    "/detokenize": (parse_detokenize, {"tokens": [1]}),
    "/abort_request": (lambda body, limits: parse_abort(body), {"id": "x"}),
}
NEEDS = {"top_logprobs": {"logprobs": True}, "stream_options": {"stream": True}, "messages": {"prompt": None}}
# Whether these are right depends on other fields, on the model, or on what the answer's form can be.
CONDITIONAL = (
    "model", "min_tokens", "tool_choice", "response_format", "continue_final_message", "tools", "input",
    "add_generation_prompt",
)  # fmt: skip


def schema_of(path: str) -> dict[str, Any]:
    body = description(LIMITS)["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return dict(body)


def whole(value: Any) -> bool:
    """Whether there is a float that JSON Schema takes for an integer, and we do not."""
    if isinstance(value, dict | list):
        return any(whole(inner) for inner in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and value.is_integer()


numbers = st.integers(-3, 200) | st.sampled_from([2**63 - 1, 2**63, -(2**63) - 1, 2**70, 0.5, 1.5, -1.5, 2.5, 1e300])
texts = st.sampled_from(["", "x", "auto", "off", "5", "05", "-1", "x" * 1025, "content", "text"])
parts = st.fixed_dictionaries({"type": st.sampled_from(["text", "content", 3]), "text": st.sampled_from(["x", None])})
scalars = st.none() | st.booleans() | numbers | texts | parts
odd = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(texts, min_size=15, max_size=18)
        | st.dictionaries(texts, inner, max_size=2)
        | st.fixed_dictionaries({"type": st.just("content"), "content": inner})
        | st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "nobody"]), "content": inner})
    ),
    max_leaves=5,
)
fields = [(path, name) for path in PARSERS for name in schema_of(path)["properties"]]


@settings(max_examples=2 * settings.default.max_examples, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(fields), odd.filter(lambda value: not whole(value)))
def test_a_field_is_right_exactly_when_the_description_says_so(field: tuple[str, str], value: Any) -> None:
    path, name = field
    schema = schema_of(path)
    parse, valid = PARSERS[path]
    body = {**valid, **NEEDS.get(name, {}), name: value} if path != "/v1/messages" else {**valid, name: value}
    if path == "/v1/chat/completions" and name == "messages":
        body.pop("prompt")
    absent = value is None and name in schema["required"]
    described = not absent and Draft202012Validator(schema["properties"][name]).is_valid(value)
    try:
        parse(body, replace(LIMITS, model=body.get("model") or "x"))
        blamed = None
    except ApiError as error:
        blamed = error.param or ""
    if described:
        assert blamed is None or name in CONDITIONAL or not blamed.startswith(name), blamed
    else:
        assert blamed is not None


def test_the_description_is_valid_and_names_every_route() -> None:
    document = json.loads(json.dumps(description(LIMITS)))
    for operations in document["paths"].values():
        for operation in operations.values():
            if "requestBody" in operation:
                Draft202012Validator.check_schema(operation["requestBody"]["content"]["application/json"]["schema"])
    lifecycle: Lifecycle[Service] = Lifecycle()
    app: Any = build_app(Settings(), lifecycle, NoTracer())
    while not hasattr(app, "routes"):
        app = app.app
    served = {(route.path.replace(":path", ""), m.lower()) for route in app.routes for m in route.methods - {"HEAD"}}
    assert served == {(path, method) for path, operations in document["paths"].items() for method in operations}


@pytest.mark.parametrize("loaded", [False, True])
def test_only_modes_of_this_server_are_named(loaded: bool) -> None:
    limits = replace(LIMITS, modes=("auto", "off"))
    found = description(limits if loaded else None)["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
    modes = found["application/json"]["schema"]["properties"]["speculation"]["enum"]
    assert modes == [None, *(limits.modes if loaded else get_args(Mode))]

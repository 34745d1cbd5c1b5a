"""What /v1/chat/completions accepts beyond the fields it shares with completions."""

from typing import Any

import pytest

from verdraft.server.errors import ApiError
from verdraft.server.jsonbody import parse_body
from verdraft.server.parse_chat import parse_chat
from verdraft.server.requests import ChatRequest, Limits

USER = {"role": "user", "content": "x"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def parse(limits: Limits, **body: Any) -> ChatRequest:
    return parse_chat({"messages": [USER], **body}, limits)


def refused(limits: Limits, **body: Any) -> tuple[str | None, str | None]:
    """(param, code) of the 400."""
    with pytest.raises(ApiError) as error:
        parse(limits, **body)
    assert error.value.status == 400
    return error.value.param, error.value.code


def test_defaults(limits: Limits) -> None:
    request = parse(limits)
    assert request.prompt.messages == (USER,)
    assert request.prompt.add_generation_prompt
    assert request.prompt.tools is None
    assert request.options.sampling.max_tokens is None
    assert request.options.sampling.logprobs is None


NULLABLE = [
    "max_completion_tokens", "max_tokens", "top_logprobs", "logprobs", "response_format", "tools", "tool_choice",
    "metadata", "service_tier", "model", "continue_final_message", "add_generation_prompt", "parallel_tool_calls",
]  # fmt: skip


def test_null_is_absent(limits: Limits) -> None:
    assert parse(limits, **dict.fromkeys(NULLABLE)) == parse(limits)


def test_template_variables_are_plain_values_of_their_own(limits: Limits) -> None:
    values = {"enable_thinking": False, "style": "x", "budget": 1.5}
    assert parse(limits, chat_template_kwargs=values).prompt.variables == values
    for bad, param in [({"messages": []}, ".messages"), ({"a": [1]}, ".a"), (3, "")]:
        with pytest.raises(ApiError) as error:
            parse(limits, chat_template_kwargs=bad)
        assert error.value.param == f"chat_template_kwargs{param}"


def test_content_parts_are_joined_and_developer_means_system(limits: Limits) -> None:
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
    messages = parse(limits, messages=[{"role": "developer", "content": parts}, USER]).prompt.messages
    assert messages == ({"role": "system", "content": "Be kind."}, USER)


def test_history_with_tools(limits: Limits) -> None:
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    history += [{"role": "tool", "tool_call_id": "c1", "content": "4"}]
    messages = parse(limits, messages=history).prompt.messages
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert messages[2] == {"role": "tool", "tool_call_id": "c1", "content": "4"}


def test_optional_message_fields(limits: Limits) -> None:
    message = {
        "role": "assistant",
        "content": "y",
        "refusal": None,
        "reasoning_content": "z",
        "name": "ann",
        "other": 1,
    }
    found = parse(limits, messages=[message]).prompt.messages[0]
    assert found == {"role": "assistant", "content": "y", "reasoning_content": "z", "name": "ann"}


BAD_MESSAGES: list[tuple[Any, str]] = [
    (None, "messages"),
    ([], "messages"),
    ("hello", "messages"),
    (USER, "messages"),
    (["hello"], "messages[0]"),
    ([USER, None], "messages[1]"),
    ([{"content": "y"}], "messages[0].role"),
    ([{"role": "wizard", "content": "y"}], "messages[0].role"),
    ([{"role": "", "content": "y"}], "messages[0].role"),
    ([{"role": None, "content": "y"}], "messages[0].role"),
    ([{"role": 5, "content": "y"}], "messages[0].role"),
    ([{"role": "User", "content": "y"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 7}], "messages[0].content"),
    ([{"role": "user", "content": {"type": "text", "text": "x"}}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
    ([USER, {"role": "assistant", "content": None}], "messages[1].content"),
    ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
    ([{"role": "user", "content": None, "tool_calls": [CALL]}], "messages[0].content"),
    ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "tool_calls": [{"type": "x"}]}], "messages[0].tool_calls[0].type"),
    ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
]


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES)
def test_bad_messages(limits: Limits, messages: Any, param: str) -> None:
    assert refused(limits, messages=messages)[0] == param


def test_codes_of_messages(limits: Limits) -> None:
    assert refused(limits, messages=None)[1] == "missing_required_parameter"
    assert refused(limits, messages=[])[1] == "empty_array"


def test_max_completion_tokens_wins(limits: Limits) -> None:
    assert parse(limits, max_tokens=9, max_completion_tokens=4).options.sampling.max_tokens == 4
    assert parse(limits, max_tokens=9).options.sampling.max_tokens == 9
    for digits in (2**63, 2**64, 10**30, int(1e308)):  # from the second on orjson reads floats
        body = parse_body(f'{{"max_tokens": {digits}}}'.encode(), "application/json")
        assert parse(limits, **body).options.sampling.max_tokens == 2**63 - 1
    for field in ("max_tokens", "max_completion_tokens"):
        assert refused(limits, **{field: 0}) == (field, "integer_below_min_value")
    assert refused(limits, max_completion_tokens=0, max_tokens=5)[0] == "max_completion_tokens"


def test_min_tokens_without_max_is_at_most_what_fits(limits: Limits) -> None:
    assert parse(limits, min_tokens=99).options.sampling.min_tokens == 99
    assert refused(limits, min_tokens=100)[0] == "min_tokens"


def test_logprobs(limits: Limits) -> None:
    assert parse(limits, logprobs=True).options.sampling.logprobs == 0
    assert parse(limits, logprobs=True, top_logprobs=20).options.sampling.logprobs == 20
    for value in (-1, 21, 1.5, "3"):
        assert refused(limits, logprobs=True, top_logprobs=value)[0] == "top_logprobs"
    for extra in ({}, {"logprobs": False}):
        assert refused(limits, top_logprobs=3, **extra)[0] == "top_logprobs"
    for value in ("yes", 1, 3):
        assert refused(limits, logprobs=value)[0] == "logprobs"


def test_continue_final_message(limits: Limits) -> None:
    messages = [USER, {"role": "assistant", "content": "One,"}]
    prompt = parse(limits, messages=messages, continue_final_message=True).prompt
    assert prompt.continue_final_message
    assert not prompt.add_generation_prompt
    wrong = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert refused(limits, **wrong)[0] == "continue_final_message"
    assert refused(limits, continue_final_message=True)[0] == "continue_final_message"


def test_tools(limits: Limits) -> None:
    assert parse(limits, tools=[TOOL]).prompt.tools == [TOOL]
    assert parse(limits, tools=[TOOL], tool_choice="auto").form is None
    assert parse(limits, tools=[TOOL], tool_choice="none").prompt.tools is None
    assert parse(limits, tools=[]).prompt.tools is None


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


BAD_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"tools": "x"}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "browser"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    (
        {"tools": [TOOL, {"type": "function", "function": {"name": "g", "parameters": 5}}]},
        "tools[1].function.parameters",
    ),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": named("other")}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
]


@pytest.mark.parametrize(("body", "param"), BAD_TOOLS, ids=[str(i) for i in range(len(BAD_TOOLS))])
def test_bad_tools(limits: Limits, body: dict[str, Any], param: str) -> None:
    assert refused(limits, **body)[0] == param


def schema(**inner: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": inner}


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("json", "invalid_type"),
        ({}, "invalid_value"),
        ({"type": "xml"}, "invalid_value"),
        ({"type": "json_schema"}, "invalid_value"),
        (schema(), "invalid_value"),
        (schema(schema={}), "invalid_value"),
        (schema(name="x", schema=5), "invalid_value"),
        (schema(name="x", schema={}, strict=1), "invalid_type"),
    ],
)
def test_response_format(limits: Limits, value: Any, code: str) -> None:
    param, found = refused(limits, response_format=value)
    assert (param.partition(".")[0], found) == ("response_format", code)
    assert parse(limits, response_format={"type": "text"}) == parse(limits)


def test_forms_of_json(limits: Limits) -> None:
    assert parse(limits).form is None
    assert parse(limits, response_format={"type": "json_object"}).form.places[0].schema == {"type": "object"}
    form = parse(limits, response_format=schema(name="x", schema={"const": 5})).form
    assert (form.places[0].schema, form.param, form.calls) == ({"const": 5}, "response_format", ())


def test_forced_calls_allow_the_named_tool_or_all(limits: Limits) -> None:
    other = {"type": "function", "function": {"name": "g"}}
    for choice, names in (("required", ("f", "g")), (named("g"), ("g",)), (named("f"), ("f",))):
        request = parse(limits, tools=[TOOL, other], tool_choice=choice)
        assert request.form.calls == names
        assert [tool["function"]["name"] for tool in request.prompt.forced] == list(names)
        assert request.prompt.tools == [TOOL, other]
    assert parse(limits, tools=[TOOL], tool_choice="auto").form is None


@pytest.mark.parametrize(
    "extra", [{"temperature": "hot"}, {"n": 0}, {"stop": ""}, {"store": True}, {"functions": [{}]}]
)
def test_shared_fields_are_checked_here_too(limits: Limits, extra: dict[str, Any]) -> None:
    assert refused(limits, **extra)[0] == next(iter(extra))

"""What /v1/messages accepts, as the chat request that it means."""

from typing import Any

import pytest

from verdraft.server.errors import ApiError
from verdraft.server.parse_messages import parse_messages_body
from verdraft.server.requests import ChatRequest, Limits

USER = {"role": "user", "content": "x"}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "4"}]}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


def parse(limits: Limits, **body: Any) -> ChatRequest:
    return parse_messages_body({"messages": [USER], "max_tokens": 5, **body}, limits)


def refused(limits: Limits, **body: Any) -> str | None:
    with pytest.raises(ApiError) as error:
        parse(limits, **body)
    assert error.value.status == 400
    return error.value.param


def test_defaults(limits: Limits) -> None:
    request = parse(limits)
    assert request.prompt.messages == (USER,)
    assert request.prompt.add_generation_prompt
    assert request.options.sampling.max_tokens == 5
    assert request.options.stop == ()


NULLABLE = [
    "model", "system", "stop_sequences", "temperature", "top_p", "top_k", "stream", "tools", "tool_choice", "metadata",
    "thinking", "container", "mcp_servers", "cache_salt", "speculation", "seed",
]  # fmt: skip


def test_null_is_absent(limits: Limits) -> None:
    assert parse(limits, **dict.fromkeys(NULLABLE)) == parse(limits)


def test_options(limits: Limits) -> None:
    body = {"stop_sequences": ["a"], "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 4, "cache_salt": "s"}
    options = parse(limits, **body, metadata={"user_id": "u"}, speculation="off", n=7, stop="ignored").options
    sampling = options.sampling
    assert (options.stop, options.cache_salt, options.speculation, options.n) == (("a",), "s", "off", 1)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 3, 4)


def test_thinking(limits: Limits) -> None:
    assert parse(limits, thinking={"type": "adaptive"}) == parse(limits)
    assert parse(limits, thinking={"type": "disabled"}).prompt.no_thoughts
    switched = parse(limits, thinking={"type": "adaptive"}, chat_template_kwargs={"enable_thinking": True})
    assert switched.prompt.variables == {"enable_thinking": True}


def test_turns(limits: Limits) -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "so"}, USE]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "and"}]},
    ]
    system, first, second, third, last = parse(limits, messages=history, system="s").prompt.messages
    assert (system, first) == ({"role": "system", "content": "s"}, {"role": "user", "content": "ab"})
    calls = [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]
    assert second == {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": calls}
    assert third == {"role": "tool", "tool_call_id": "t1", "content": "4"}
    assert last == {"role": "user", "content": "and"}


def test_a_last_turn_of_the_assistant_is_continued(limits: Limits) -> None:
    prompt = parse(limits, messages=[USER, {"role": "assistant", "content": "One,"}]).prompt
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)


def test_tools_in_the_form_of_chat_completions(limits: Limits) -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert parse(limits, tools=[TOOL]).prompt.tools == [{"type": "function", "function": function}]
    assert parse(limits, tools=[TOOL], tool_choice={"type": "none"}).prompt.tools is None
    assert parse(limits, tools=[TOOL], tool_choice={"type": "auto"}).form is None


@pytest.mark.parametrize(("choice", "names"), [({"type": "any"}, ("f", "g")), ({"type": "tool", "name": "g"}, ("g",))])
def test_forced_calls(limits: Limits, choice: dict[str, str], names: tuple[str, ...]) -> None:
    form = parse(limits, tools=[TOOL, {**TOOL, "name": "g"}], tool_choice=choice).form
    assert form is not None
    assert form.calls == names


def test_a_schema_for_the_answer(limits: Limits) -> None:
    form = parse(limits, output_config={"format": {"type": "json_schema", "schema": {"type": "array"}}}).form
    assert form is not None
    assert form.places[0].schema == {"type": "array"}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{**USE, "input": 5}]}]}, "messages[0].content[0].input"),
    ({"messages": [{"role": "assistant", "content": [{**USE, "id": None}]}]}, "messages[0].content[0].id"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"temperature": 1.5}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": 5}, "stop_sequences"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"thinking": {}}, "thinking"),
    (
        {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}},
        "chat_template_kwargs.enable_thinking",
    ),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"speculation": "magic"}, "speculation"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{i}-{param}" for i, (_, param) in enumerate(BAD)])
def test_bad_bodies(limits: Limits, body: dict[str, Any], param: str) -> None:
    assert refused(limits, **body) == param

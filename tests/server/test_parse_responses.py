"""What /v1/responses accepts, as the chat request that it means."""

from typing import Any

import pytest

from verdraft.server.errors import ApiError
from verdraft.server.parse_responses import ResponsesRequest, parse_responses_body
from verdraft.server.requests import Limits

TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}


def parse(limits: Limits, **body: Any) -> ResponsesRequest:
    return parse_responses_body({"input": "x", **body}, limits)


def messages(limits: Limits, *items: Any, **body: Any) -> tuple[Any, ...]:
    return parse(limits, input=list(items), **body).chat.prompt.messages


def refused(limits: Limits, **body: Any) -> str | None:
    with pytest.raises(ApiError) as error:
        parse(limits, **body)
    assert error.value.status == 400
    return error.value.param


NULLABLE = [
    "model", "instructions", "max_output_tokens", "temperature", "top_p", "stream", "tools", "tool_choice", "text",
    "metadata", "store", "previous_response_id", "background", "conversation", "include", "truncation", "reasoning",
    "parallel_tool_calls", "user", "top_logprobs", "stream_options", "seed", "stop",
]  # fmt: skip


def test_null_is_absent(limits: Limits) -> None:
    plain = parse(limits)
    assert plain.chat.prompt.messages == ({"role": "user", "content": "x"},)
    assert parse(limits, **dict.fromkeys(NULLABLE)) == plain


def test_options(limits: Limits) -> None:
    body = {"max_output_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 4, "cache_salt": "s", "stop": "a"}
    options = parse(limits, **body, store=False, n=7, best_of=3).chat.options
    assert (options.sampling.max_tokens, options.sampling.temperature, options.sampling.seed) == (7, 0.5, 4)
    assert (options.stop, options.cache_salt, options.n) == (("a",), "s", 1)


@pytest.mark.parametrize(("top", "found"), [({}, 0), ({"top_logprobs": 4}, 4)])
def test_logprobs_are_asked_for_by_include(limits: Limits, top: dict[str, int], found: int) -> None:
    request = parse(limits, include=["message.output_text.logprobs"], **top)
    assert (request.chat.options.sampling.logprobs, request.shown["top_logprobs"]) == (found, found)
    assert parse(limits, include=[], top_logprobs=0).chat.options.sampling.logprobs is None


def test_instructions_and_messages(limits: Limits) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    said = {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]}
    found = messages(limits, {"role": "developer", "content": "d"}, {"role": "user", "content": parts}, said, said,
                     instructions="i")  # fmt: skip
    assert [(m["role"], m["content"]) for m in found] == [
        ("system", "i"), ("system", "d"), ("user", "ab"), ("assistant", "c"), ("assistant", "c")
    ]  # fmt: skip


def test_the_items_of_one_turn_are_joined(limits: Limits) -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    calls = [{"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"} for i in range(2)]
    results = [{"type": "function_call_output", "call_id": f"c{i}", "output": str(i)} for i in range(2)]
    said = {"role": "assistant", "content": "so"}
    turn, *tools, last = messages(limits, thought, said, *calls, *results, calls[0])
    assert (turn["role"], turn["content"], turn["reasoning_content"]) == ("assistant", "so", "hm")
    assert [call["id"] for call in turn["tool_calls"]] == ["c0", "c1"]
    assert tools == [{"role": "tool", "tool_call_id": f"c{i}", "content": str(i)} for i in range(2)]
    assert [call["function"]["name"] for call in last["tool_calls"]] == ["f"]


def test_tools_in_the_form_of_chat_completions(limits: Limits) -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    found = parse(limits, tools=[TOOL])
    assert found.chat.prompt.tools == [{"type": "function", "function": function}]
    assert found.shown["tools"] == [TOOL]
    assert parse(limits, tools=[TOOL], tool_choice="none").chat.prompt.tools is None
    assert parse(limits, tools=[TOOL], tool_choice="auto").chat.form is None


@pytest.mark.parametrize(("choice", "names"), [("required", ("f", "g")), ({"type": "function", "name": "g"}, ("g",))])
def test_forced_calls(limits: Limits, choice: Any, names: tuple[str, ...]) -> None:
    form = parse(limits, tools=[TOOL, {**TOOL, "name": "g"}], tool_choice=choice).chat.form
    assert form is not None
    assert form.calls == names


def test_forms_of_the_answer(limits: Limits) -> None:
    def form(**text: Any) -> Any:
        return parse(limits, text={"format": text}).chat.form

    assert form(type="text") is None
    assert form(type="json_object").places[0].schema == {"type": "object"}
    assert form(type="json_schema", name="n", strict=True, schema={"type": "array"}).places[0].schema == {
        "type": "array"
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"include": ["reasoning.encrypted_content"]}, "include"),
    ({"include": "message.output_text.logprobs"}, "include"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
    ({"truncation": "auto"}, "truncation"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"metadata": {"a": 5}}, "metadata"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{i}-{param}" for i, (_, param) in enumerate(BAD)])
def test_bad_bodies(limits: Limits, body: dict[str, Any], param: str) -> None:
    assert refused(limits, **body) == param

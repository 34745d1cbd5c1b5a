"""The official clients' own ways to ask for an object or a call, against a running server."""

from typing import Any, Literal

import anthropic
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

pytestmark = pytest.mark.demo

RunningServer = Any  # conftest's class: a server with .url


class Paint(BaseModel):
    """A paint to buy."""

    colour: Literal["red", "green", "blue"]
    glossy: bool


CHAT: Any = [{"role": "user", "content": "I need glossy red paint."}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "glossy": {"type": "boolean"}},
    "required": ["colour", "glossy"],
    "additionalProperties": False,
}
TOOL = {"name": "buy", "description": "Buy a paint.", "input_schema": SCHEMA}


def test_openai_parses_chat(sdk: openai.OpenAI, model: str) -> None:
    ask: dict[str, Any] = {"model": model, "messages": CHAT, "response_format": Paint, "temperature": 0}
    plain = sdk.chat.completions.parse(**ask).choices[0].message.parsed
    assert isinstance(plain, Paint)
    with sdk.chat.completions.stream(**ask) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == plain


def test_openai_parses_responses(sdk: openai.OpenAI, model: str) -> None:
    ask: dict[str, Any] = {"model": model, "input": CHAT, "text_format": Paint, "temperature": 0}
    plain = sdk.responses.parse(**ask)
    assert isinstance(plain.output_parsed, Paint)
    with sdk.responses.stream(**ask) as stream:
        assert stream.get_final_response().output_parsed == plain.output_parsed


def test_openai_tools(sdk: openai.OpenAI, model: str) -> None:
    tool = openai.pydantic_function_tool(Paint, name="buy")
    ask: dict[str, Any] = {
        "model": model,
        "messages": CHAT,
        "temperature": 0,
        "tools": [tool],
        "tool_choice": "required",
    }
    (call,) = sdk.chat.completions.parse(**ask).choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Paint)
    with sdk.chat.completions.stream(**ask) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert (streamed.function.name, streamed.function.arguments) == ("buy", call.function.arguments)
    answered = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude={"parsed"})]}]
    answered.append({"role": "tool", "tool_call_id": call.id, "content": "sold out"})
    last = sdk.chat.completions.create(model=model, messages=answered, tools=[tool], max_completion_tokens=4)
    assert last.choices[0].message.content


def test_openai_tools_in_responses(sdk: openai.OpenAI, model: str) -> None:
    tool: Any = {"type": "function", "name": "buy", "parameters": SCHEMA, "strict": True}
    items: list[Any] = [*CHAT]
    ask: dict[str, Any] = {"model": model, "tools": [tool], "temperature": 0}
    first = sdk.responses.create(input=items, tool_choice={"type": "function", "name": "buy"}, **ask)
    (call,) = first.output
    assert call.type == "function_call"
    Paint.model_validate_json(call.arguments)
    with sdk.responses.stream(input=items, tool_choice="required", **ask) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "sold out"}]
    assert sdk.responses.create(input=items, max_output_tokens=4, **ask).output_text


def test_anthropic_tools(claude: anthropic.Anthropic, model: str) -> None:
    tools: Any = {"tools": [TOOL], "tool_choice": {"type": "any"}, "extra_body": {"temperature": 0}}
    plain = claude.messages.create(model=model, max_tokens=64, messages=CHAT, **tools)
    (use,) = plain.content
    assert plain.stop_reason == "tool_use"
    assert use.type == "tool_use"
    Paint.model_validate(use.input)
    with claude.messages.stream(model=model, max_tokens=64, messages=CHAT, **tools) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert (streamed.name, streamed.input) == (use.name, use.input)
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "sold out"}
    turns: Any = [*CHAT, {"role": "assistant", "content": plain.content}, {"role": "user", "content": [result]}]
    last = claude.messages.create(model=model, max_tokens=4, messages=turns, tools=tools["tools"])
    assert last.content[0].type == "text"


def test_anthropic_parses(claude: anthropic.Anthropic, model: str) -> None:
    found = claude.messages.parse(model=model, max_tokens=64, messages=CHAT, output_format=Paint)
    assert isinstance(found.parsed_output, Paint)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain(server: RunningServer, model: str, method: Any, responses: bool) -> None:
    llm = ChatOpenAI(
        model=model,
        base_url=f"{server.url}/v1",
        api_key=SecretStr("unused"),
        temperature=0,
        max_retries=0,
        use_responses_api=responses,
    )
    assert isinstance(llm.with_structured_output(Paint, method=method).invoke("I need glossy red paint."), Paint)


def test_langchain_binds_tools(server: RunningServer, model: str) -> None:
    llm = ChatOpenAI(
        model=model, base_url=f"{server.url}/v1", api_key=SecretStr("unused"), temperature=0, max_retries=0
    )
    answer = llm.bind_tools([Paint], tool_choice="Paint").invoke("I need glossy red paint.")
    (call,) = answer.tool_calls
    assert call["name"] == "Paint"
    Paint.model_validate(call["args"])

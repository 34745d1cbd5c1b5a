"""The official clients against a running server: what they send is understood, and they understand what comes."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

pytestmark = pytest.mark.demo

RunningServer = Any  # conftest's class: a server with .url

ASK = "Say hi."
CHAT: Any = [{"role": "user", "content": ASK}]
GREEDY = {"temperature": 0}  # which some versions of the client know no more


@pytest.fixture
async def async_sdk(server: RunningServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def said(sdk: openai.OpenAI, model: str) -> str:
    """What every endpoint must say to ASK, greedily."""
    answer = sdk.chat.completions.create(model=model, messages=CHAT, temperature=0, max_completion_tokens=64)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content
    return answer.choices[0].message.content


def test_chat_streams(sdk: openai.OpenAI, model: str, said: str) -> None:
    options = {"include_usage": True}
    ask: dict[str, Any] = {"model": model, "messages": CHAT, "temperature": 0, "max_completion_tokens": 64}
    chunks = list(sdk.chat.completions.create(**ask, stream=True, stream_options=options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == said
    assert chunks[-1].usage.completion_tokens < 64
    with sdk.chat.completions.stream(**ask) as stream:
        assert stream.get_final_completion().choices[0].message.content == said


async def test_chat_without_waiting(async_sdk: openai.AsyncOpenAI, model: str, said: str) -> None:
    ask: dict[str, Any] = {"model": model, "messages": CHAT, "temperature": 0, "max_completion_tokens": 64}
    plain = await async_sdk.chat.completions.create(**ask)
    chunks = [c async for c in await async_sdk.chat.completions.create(**ask, stream=True)]
    assert plain.choices[0].message.content == "".join(c.choices[0].delta.content or "" for c in chunks) == said


def test_responses(sdk: openai.OpenAI, model: str, said: str) -> None:
    ask: dict[str, Any] = {"model": model, "input": ASK, "temperature": 0, "max_output_tokens": 64}
    plain = sdk.responses.create(**ask)
    with sdk.responses.stream(**ask) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    raw = list(sdk.responses.create(**ask, stream=True))
    assert plain.output_text == "".join(deltas) == said
    assert raw[0].type == "response.created"
    assert raw[-1].type == "response.completed"
    assert raw[-1].response.output_text == said
    assert plain.usage is not None
    assert plain.usage.output_tokens < 64


def test_a_response_goes_on_with_the_items_of_the_last(sdk: openai.OpenAI, model: str, said: str) -> None:
    items: list[Any] = [{"role": "user", "content": ASK}]
    first = sdk.responses.create(model=model, input=items, temperature=0, max_output_tokens=64)
    items += [*first.output, {"role": "user", "content": "Which is the warmest?"}]
    second = sdk.responses.create(model=model, input=items, temperature=0, max_output_tokens=8)
    turns = [*CHAT, {"role": "assistant", "content": said}, {"role": "user", "content": "Which is the warmest?"}]
    chat = sdk.chat.completions.create(model=model, messages=turns, temperature=0, max_completion_tokens=8)
    assert second.output_text == chat.choices[0].message.content
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.responses.create(model=model, input="x", previous_response_id=first.id)
    assert refused.value.param == "previous_response_id"


async def test_responses_without_waiting(async_sdk: openai.AsyncOpenAI, model: str, said: str) -> None:
    async with async_sdk.responses.stream(model=model, input=ASK, temperature=0) as stream:
        final = await stream.get_final_response()
    assert (final.status, final.output_text) == ("completed", said)
    cut = await async_sdk.responses.create(model=model, input=ASK, temperature=0, max_output_tokens=2, stream=True)
    *_, last = [event async for event in cut]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"


def test_anthropic_messages(claude: anthropic.Anthropic, model: str, said: str) -> None:
    ask: dict[str, Any] = {"model": model, "messages": CHAT, "max_tokens": 64, "extra_body": GREEDY}
    plain = claude.messages.create(**ask)
    assert [block.text for block in plain.content if block.type == "text"] == [said]
    with claude.messages.stream(**ask) as stream:
        assert "".join(stream.text_stream) == said
        final = stream.get_final_message()
    assert (final.stop_reason, [block.type for block in final.content]) == (plain.stop_reason, ["text"])
    assert final.usage.output_tokens == plain.usage.output_tokens
    counted = claude.messages.count_tokens(model=model, messages=CHAT).input_tokens
    assert counted == plain.usage.input_tokens + (plain.usage.cache_read_input_tokens or 0)


def test_anthropic_system_stops_and_errors(claude: anthropic.Anthropic, model: str) -> None:
    ask: dict[str, Any] = {"model": model, "messages": CHAT, "max_tokens": 64, "extra_body": GREEDY}
    whole = claude.messages.create(**ask, system="You are a painter.").content[0]
    assert whole.type == "text"
    stop = whole.text[5:9]
    cut = claude.messages.create(**ask, system="You are a painter.", stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].type == "text"
    assert cut.content[0].text == whole.text[: whole.text.index(stop)]
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(**{**ask, "extra_body": {"temperature": 2}})
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**{**ask, "model": "claude-none"})


async def test_anthropic_without_waiting(server: RunningServer, model: str, said: str) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=server.url, api_key="unused", max_retries=0) as client,
        client.messages.stream(model=model, messages=CHAT, max_tokens=64, extra_body=GREEDY) as stream,
    ):
        assert "".join([text async for text in stream.text_stream]) == said


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain(server: RunningServer, model: str, said: str, responses: bool) -> None:
    llm = ChatOpenAI(
        model=model,
        base_url=f"{server.url}/v1",
        api_key=SecretStr("unused"),
        temperature=0,
        max_completion_tokens=64,
        max_retries=0,
        use_responses_api=responses,
    )
    answer = llm.invoke([HumanMessage(ASK)])
    assert isinstance(answer, AIMessage)
    assert answer.text == said
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] < 64
    assert "".join(chunk.text for chunk in llm.stream(ASK)) == said

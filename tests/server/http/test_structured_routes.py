"""Forms and calls over HTTP. The scripted engine says what it likes, so this is about the shape of the answers."""

import asyncio
import json
import threading
from collections import Counter
from typing import Any

import pytest

from verdraft.server import grammars

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "tell"}}
NAMED = {"type": "function", "function": {"name": "find"}}


async def post(s: Any, **body: Any) -> Any:
    return await s.client.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}], **body})


def deltas(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return [choice for line in lines for choice in json.loads(line)["choices"]]


async def test_schemas_that_take_too_long_keep_nobody_else_waiting(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They used to hold the threads that tokenise, four seconds each."""
    monkeypatch.setattr(grammars, "MAX_SECONDS", 3.0)
    end = threading.Event()
    body = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}

    def form(number: int) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": number}}}

    async with stage() as s:
        assert (await post(s, response_format=body)).status_code == 200
        monkeypatch.setattr(s.lifecycle.service.text.grammars, "_matcher", lambda source: end.wait(30))
        flood = [asyncio.create_task(post(s, response_format=form(number))) for number in range(40)]
        await asyncio.sleep(0.2)
        async with asyncio.timeout(1):
            assert (await post(s)).status_code == 200
            assert (await post(s, response_format=body)).status_code == 200  # a schema that is known
        found = Counter([answer.status_code for answer in await asyncio.gather(*flood)])
        assert found == {400: grammars.MAX_COMPILING, 429: 40 - grammars.MAX_COMPILING}
        assert (await post(s, response_format=form(-1))).headers["retry-after"]
        end.set()


async def test_equal_schemas_at_once_are_compiled_once(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a crowd with one new schema, two compiled it each for itself, and most got 429."""
    monkeypatch.setattr(grammars, "MAX_RENEWAL_SECONDS", 60.0)  # no spares
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 1}}}
    async with stage() as s:
        kept = s.lifecycle.service.text.grammars
        compile_one, go_on, sources = kept._matcher, threading.Event(), []

        def slowly(source: str) -> Any:
            sources.append(source)
            assert go_on.wait(20)
            return compile_one(source)

        monkeypatch.setattr(kept, "_matcher", slowly)
        crowd = [asyncio.create_task(post(s, response_format=form)) for _ in range(40)]
        await asyncio.sleep(0.5)
        crowd[0].cancel()  # whoever came first may leave
        await asyncio.sleep(1.0)  # longer than a seat is waited for
        go_on.set()
        answers = await asyncio.gather(*crowd[1:])
        assert {answer.status_code for answer in answers} == {200}
        assert len(sources) == 1


CALLS = [
    (["{", '"a": ', '"b"', "}"], [TOOL], NAMED, '{"a": "b"}'),
    (["{", '"a": ', '"b"', "}"], [TOOL], "required", '{"a": "b"}'),
    (['{"name": "fi', 'nd", "arguments": ', '{"a": {}', "}}"], [TOOL, OTHER], "required", '{"a": {}}'),
]


@pytest.mark.parametrize(("words", "tools", "choice", "arguments"), CALLS)
async def test_a_forced_call(stage: Any, words: list[str], tools: Any, choice: Any, arguments: str) -> None:
    async with stage() as s:
        s.engine.words = words
        plain = (await post(s, tools=tools, tool_choice=choice, return_token_ids=True)).json()["choices"][0]
        stream = deltas((await post(s, tools=tools, tool_choice=choice, stream=True, return_token_ids=True)).text)
        finished = await s.metric('verdraft_request_success_total{finished_reason="tool_calls"}')
    (call,) = plain["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert (call["type"], call["function"]) == ("function", {"name": "find", "arguments": arguments})
    assert (plain["message"]["content"], plain["finish_reason"]) == (None, "tool_calls")
    parts = [part for choice in stream for part in choice["delta"].get("tool_calls", ())]
    assert parts[0] | {"id": "", "function": {"name": "find"}} == {
        "index": 0,
        "id": "",
        "type": "function",
        "function": {"name": "find"},
    }
    assert all(set(part) == {"index", "function"} and set(part["function"]) == {"arguments"} for part in parts[1:])
    assert "".join(part["function"]["arguments"] for part in parts) == arguments
    assert "".join(choice["delta"].get("content", "") for choice in stream) == ""
    assert [token for choice in stream for token in choice.get("token_ids", ())] == plain["token_ids"]
    assert [choice["finish_reason"] for choice in stream if choice["finish_reason"]] == ["tool_calls"]
    assert finished == 2


async def test_a_call_that_is_cut_ends_as_length(stage: Any) -> None:
    async with stage() as s:
        s.engine.words, s.engine.finish = ['{"a": ', '"b'], type(s.engine.finish)(finish="length")
        plain = (await post(s, tools=[TOOL], tool_choice="required")).json()["choices"][0]
    assert plain["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": "b'
    assert plain["finish_reason"] == "length"


async def test_each_choice_has_a_grammar_of_its_own(stage: Any) -> None:
    async with stage() as s:
        await post(s, n=2, response_format={"type": "json_object"})
        await post(s, response_format={"type": "json_object"})
        assert await s.metric("verdraft_grammar_cache_entries") == 1
        constraints = [request.constraint for request in s.engine.requests]
    assert len(set(map(id, constraints))) == 3


async def test_a_schema_that_is_not_supported_names_the_place(stage: Any) -> None:
    inner = {"type": "object", "properties": {"a": {"not": {}}}}
    async with stage() as s:
        json_schema = {"name": "x", "schema": inner}
        answer = await post(s, stream=True, response_format={"type": "json_schema", "json_schema": json_schema})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("response_format", "unsupported_parameter")
    assert "json_schema.schema.properties.a.not" in error["message"]


async def test_when_the_grammar_leaves_nothing_it_is_the_clients_mistake(stage: Any) -> None:
    async with stage() as s:
        s.engine.finish = type(s.engine.finish)(finish="error", error_code="invalid_value")
        answer = await post(s, response_format={"type": "json_object"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")

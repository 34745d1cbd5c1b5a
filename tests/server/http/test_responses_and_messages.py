"""/v1/responses and /v1/messages over a scripted engine: exact event orders, equality of streams, errors, keys."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from verdraft.scheduler.outputs import TokenSlice

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ASK = {"input": "hi", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
SPOKEN = "Hello there \u00e9!"
OPENED = ["response.output_item.added", "response.content_part.added"]
CLOSED = ["response.content_part.done", "response.output_item.done"]
TEXT = [*OPENED, "response.output_text.delta", "response.output_text.done", *CLOSED]
THOUGHT = [*OPENED, "response.reasoning_text.delta", "response.reasoning_text.done", *CLOSED]
BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]
THINKING = "{% for m in messages %}<|start|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"


def events(text: str) -> list[Any]:
    """Payloads of named events; the name says the payload's type, and nothing comes behind the last."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def order(found: list[Any]) -> list[str]:
    """The types, repeated ones once."""
    kinds = [event["type"] for event in found]
    return [kind for i, kind in enumerate(kinds) if not i or kinds[i - 1] != kind]


async def post(stage: Any, path: str, **body: Any) -> Any:
    return await stage.client.post(path, json={**ASK, **body})


async def streamed(stage: Any, path: str, **body: Any) -> list[Any]:
    answer = await post(stage, path, stream=True, **body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)


def same_but_ids(one: Any, other: Any) -> bool:
    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: bare(entry) for key, entry in value.items() if key not in ("id", "created_at")}
        return [bare(entry) for entry in value] if isinstance(value, list) else value

    return bool(bare(one) == bare(other))


async def test_the_events_of_a_response(stage: Any) -> None:
    async with stage() as s:
        plain = (await post(s, RESPONSES, return_token_ids=True, return_speculation=True)).json()
        found = await streamed(s, RESPONSES, return_token_ids=True, return_speculation=True)
    assert order(found) == ["response.created", "response.in_progress", *TEXT, "response.completed"]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert same_but_ids(found[-1]["response"], plain)
    deltas = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == plain["output"][0]["content"][0]["text"] == SPOKEN
    assert found[0]["response"]["status"] == "in_progress"
    items = [event["item"] for event in found if "item" in event]
    assert [item["status"] for item in items] == ["in_progress", "completed"]
    assert {event["item_id"] for event in found if "item_id" in event} == {items[0]["id"]}
    assert items[1] == found[-1]["response"]["output"][0]


async def test_the_logprobs_of_a_response(stage: Any) -> None:
    """Every token has one entry, in the delta that shows it; the bytes join to the text."""
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    async with stage() as s:
        plain = (await post(s, RESPONSES, **asked)).json()
        found = await streamed(s, RESPONSES, **asked, stop=["the moon"])
        chat = (await post(s, "/v1/chat/completions", logprobs=True, top_logprobs=1)).json()
        bare = (await post(s, RESPONSES)).json()
    (part,) = plain["output"][0]["content"]
    assert part["logprobs"] == chat["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode() == part["text"] == SPOKEN
    assert (plain["top_logprobs"], bare["top_logprobs"]) == (1, 0)
    assert bare["output"][0]["content"][0]["logprobs"] == []
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
    (done,) = [event for event in found if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == found[-1]["response"]["output"][0]["content"][0]["logprobs"] == part["logprobs"]


@pytest.mark.parametrize("more", [{"tools": [{"type": "function", "name": "f"}], "tool_choice": "required"}, {}])
async def test_logprobs_of_thoughts_and_calls_are_refused(stage: Any, more: Any) -> None:
    async with stage(template=None if more else THINKING) as s:
        answer = await post(s, RESPONSES, include=["message.output_text.logprobs"], **more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "include")


async def test_a_response_object(stage: Any) -> None:
    async with stage() as s:
        asked = {"instructions": "Be kind.", "temperature": 0.5, "metadata": {"a": "b"}, "max_output_tokens": 9}
        answer = (await post(s, RESPONSES, return_speculation=True, **asked)).json()
        assert s.engine.requests[0].params.max_tokens == 9
    assert answer["id"].startswith("resp_")
    assert {
        "object": "response",
        "status": "completed",
        "store": False,
        "error": None,
        **asked,
    }.items() <= answer.items()
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"] == {"cached_tokens": 1}
    assert answer["speculation"]["num_draft_tokens"] == 10


async def test_the_events_of_a_message(stage: Any) -> None:
    async with stage() as s:
        plain = (await post(s, MESSAGES, return_token_ids=True, return_speculation=True)).json()
        found = await streamed(s, MESSAGES, return_token_ids=True, return_speculation=True)
    kinds = ["message_start", BLOCK[0], "ping", *BLOCK[1:], "message_delta", "message_stop"]
    assert order(found) == kinds
    last = found[-2]
    joined = "".join(event["delta"]["text"] for event in found if event["type"] == "content_block_delta")
    whole = found[0]["message"] | {"content": [{"type": "text", "text": joined}]} | last["delta"]
    whole |= {key: last[key] for key in ("usage", "speculation", "token_ids", "prompt_token_ids")}
    assert same_but_ids(whole, plain)
    assert joined == SPOKEN
    assert plain["usage"]["cache_read_input_tokens"] == 1
    assert plain["usage"]["input_tokens"] + 1 == len(plain["prompt_token_ids"])


async def test_how_a_message_ends(stage: Any) -> None:
    async with stage() as s:
        done = (await post(s, MESSAGES)).json()
        s.engine.words, s.engine.finish = ["Hello th", "e x"], TokenSlice(finish="stop")
        stopped = (await post(s, MESSAGES, stop_sequences=["the", "the x"])).json()
        s.engine.finish = TokenSlice(finish="length")
        cut = (await post(s, MESSAGES)).json()
        response = (await post(s, RESPONSES)).json()
    assert (done["stop_reason"], done["stop_sequence"]) == ("end_turn", None)
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "the")
    assert stopped["content"] == [{"type": "text", "text": "Hello "}]
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"


async def test_a_cut_response_ends_with_response_incomplete(stage: Any) -> None:
    async with stage() as s:
        s.engine.finish = TokenSlice(finish="length")
        found = await streamed(s, RESPONSES)
    assert order(found)[-1] == "response.incomplete"
    assert found[-2]["item"]["status"] == "incomplete"


async def test_thoughts_are_blocks_of_their_own(stage: Any) -> None:
    async with stage(template=THINKING) as s:
        s.engine.words = ["<think>", "hm", "</think>", "\n\n", "yes"]
        response = await streamed(s, RESPONSES)
        message = await streamed(s, MESSAGES)
        plain = (await post(s, MESSAGES)).json()
        usage = (await post(s, RESPONSES)).json()["usage"]
    assert order(response) == ["response.created", "response.in_progress", *THOUGHT, *TEXT, "response.completed"]
    assert [item["type"] for item in response[-1]["response"]["output"]] == ["reasoning", "message"]
    blocks = [BLOCK[0], "ping", *BLOCK[1:], *BLOCK]
    assert order(message) == ["message_start", *blocks, "message_delta", "message_stop"]
    assert [list(block.values()) for block in plain["content"]] == [["thinking", "hm", ""], ["text", "yes"]]
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0


FUNCTION = {"name": "f", "description": "d"}
FORCED: dict[str, dict[str, Any]] = {
    RESPONSES: {"tools": [{"type": "function", **FUNCTION, "parameters": {}}], "tool_choice": "required"},
    MESSAGES: {"tools": [{**FUNCTION, "input_schema": {}}], "tool_choice": {"type": "tool", "name": "f"}},
}
CALL = ["response.output_item.added", "response.function_call_arguments.delta", "response.function_call_arguments.done"]


async def test_a_call_is_a_block_of_its_own(stage: Any) -> None:
    async with stage() as s:
        s.engine.words = ['{"a":', " 1}"]
        response = await streamed(s, RESPONSES, **FORCED[RESPONSES])
        plain = (await post(s, RESPONSES, **FORCED[RESPONSES])).json()
        message = await streamed(s, MESSAGES, **FORCED[MESSAGES])
        whole = (await post(s, MESSAGES, **FORCED[MESSAGES])).json()
        s.engine.words, s.engine.finish = ['{"a":'], TokenSlice(finish="length")
        cut = (await post(s, MESSAGES, **FORCED[MESSAGES])).json()
    kinds = [*CALL, "response.output_item.done", "response.completed"]
    assert order(response) == ["response.created", "response.in_progress", *kinds]
    (item,) = response[-1]["response"]["output"]
    assert (item["type"], item["name"], item["arguments"], item["status"]) == (
        "function_call",
        "f",
        '{"a": 1}',
        "completed",
    )
    assert same_but_ids({**item, "call_id": ""}, {**plain["output"][0], "call_id": ""})
    parts = [event["delta"]["partial_json"] for event in message if event["type"] == "content_block_delta"]
    assert "".join(parts) == '{"a": 1}'
    assert message[1]["content_block"]["input"] == {}
    assert (message[-2]["delta"]["stop_reason"], whole["stop_reason"], cut["stop_reason"]) == (
        "tool_use", "tool_use", "max_tokens",
    )  # fmt: skip
    assert [block["input"] for block in (*whole["content"], *cut["content"])] == [{"a": 1}, {}]


@pytest.mark.parametrize(
    ("path", "form", "param"),
    [
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}}, "text.format"),
        (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "output_config.format",
        ),
    ],
)
async def test_a_schema_that_cannot_be_used_names_its_field(stage: Any, path: str, form: Any, param: str) -> None:
    async with stage() as s:
        answers = [await post(s, path, **form), await post(s, path, **form, **FORCED[path])]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert {answer.json()["error"]["param"] for answer in answers} == {param}


@pytest.mark.parametrize("stream", [False, True])
async def test_integers_of_any_size_are_repeated_as_they_came(stage: Any, stream: bool) -> None:
    """Beyond 64 bits they were once a 500, and cut streams off."""
    used = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 10**400}}
    turns = [*ASK["messages"], {"role": "assistant", "content": [used]}, *ASK["messages"]]
    async with stage(template="{% for m in messages %}x{% endfor %}") as s:
        response = await post(s, RESPONSES, stream=stream, reasoning={"x": 10**400})
        message = await post(s, MESSAGES, stream=stream, messages=turns)
    assert (response.status_code, message.status_code) == (200, 200)
    whole = events(response.text)[-1]["response"] if stream else response.json()
    assert whole["reasoning"] == {"x": 10**400}


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_an_answer_without_text_has_one_empty_block(stage: Any, path: str) -> None:
    async with stage() as s:
        s.engine.words = []
        plain, found = (await post(s, path)).json(), await streamed(s, path)
    assert (plain["output"][0] if path == RESPONSES else plain)["content"][0]["text"] == ""
    assert not [event for event in found if event["type"].endswith("delta") and "usage" not in event]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_before_the_first_byte_has_its_status(stage: Any, path: str, stream: bool) -> None:
    async with stage() as s:
        s.engine.words, s.engine.finish = [], TokenSlice(finish="error", error_code="internal_error")
        failed = await post(s, path, stream=stream)
        bad = await post(s, path, stream=stream, temperature=7)
    assert (failed.status_code, bad.status_code) == (500, 400)
    assert bad.json()["error"]["param"] == "temperature"


async def failure(s: Any, path: str) -> list[Any]:
    s.engine.hold_at, s.engine.finish = 1, TokenSlice(finish="error", error_code="internal_error")
    waiting = asyncio.create_task(streamed(s, path))
    await s.engine.held()
    s.engine.release.set()
    return await waiting


async def test_an_error_after_the_first_byte_is_an_event(stage: Any) -> None:
    async with stage() as s:
        response = (await failure(s, RESPONSES))[-1]
    assert response["type"] == "response.failed"
    assert (response["response"]["status"], response["response"]["error"]["code"]) == ("failed", "internal_error")
    assert response["response"]["output"][0]["status"] == "in_progress"
    async with stage() as s:
        message = (await failure(s, MESSAGES))[-1]
    assert (message["type"], message["error"]["code"]) == ("error", "internal_error")


@pytest.mark.parametrize(
    ("path", "ending"),
    [
        (RESPONSES, lambda found: found[-1]["response"]["incomplete_details"]["reason"]),
        (MESSAGES, lambda found: found[-2]["delta"]["stop_reason"]),
    ],
)
async def test_an_aborted_answer_says_so(stage: Any, path: str, ending: Callable[[list[Any]], str]) -> None:
    async with stage() as s:
        s.engine.hold_at = 1
        waiting = asyncio.create_task(streamed(s, path))
        await s.engine.held()
        await s.client.post("/abort_request", json={"id": s.engine.requests[0].id})
        assert ending(await waiting) == "abort"


async def test_the_key_may_stand_where_the_clients_of_the_path_put_it(stage: Any) -> None:
    async with stage(api_key="sk-secret") as s:
        tries = [
            await s.client.post(path, json=ASK, headers=headers)
            for path in (MESSAGES, RESPONSES)
            for headers in (
                {"x-api-key": "sk-secret"},
                {"x-api-key": "wrong"},
                {"authorization": "Bearer sk-secret"},
                {},
            )
        ]
    assert [answer.status_code for answer in tries] == [200, 401, 200, 401, 401, 401, 200, 401]


async def test_the_clients_of_either_api_see_the_models(stage: Any) -> None:
    keys = [{"x-api-key": "sk-secret"}, {"authorization": "Bearer sk-secret"}, {"x-api-key": "wrong"}, {}]
    async with stage(api_key="sk-secret") as s:
        tries = [
            await s.client.get(path, headers=headers)
            for path in ("/v1/models", "/v1/models/org/demo", "/version")
            for headers in keys
        ]
    assert [answer.status_code for answer in tries] == [200, 200, 401, 401] * 2 + [401, 200, 401, 401]


async def test_a_prompt_that_is_too_long_names_the_field_that_holds_it(stage: Any) -> None:
    long = "x" * 300
    async with stage() as s:
        response = await post(s, RESPONSES, input=long)
        message = await post(s, MESSAGES, messages=[{"role": "user", "content": long}])
    assert [a.json()["error"]["param"] for a in (response, message)] == ["input", "messages"]


async def test_there_are_no_embeddings(stage: Any) -> None:
    async with stage() as s:
        answer = await s.client.post("/v1/embeddings", json={"input": "x", "model": "org/demo"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("not_found", "invalid_request_error", None)

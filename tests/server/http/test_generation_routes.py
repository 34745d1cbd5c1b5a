"""Chat and text completions over a scripted engine: shapes, equality of streams, errors, clients that leave."""

import asyncio
import json
from typing import Any

import pytest

from verdraft.scheduler.errors import EngineDead, QueueFull
from verdraft.scheduler.outputs import TokenSlice
from verdraft.server.tokenizer import TextTokenizer

CHAT, COMP = "/v1/chat/completions", "/v1/completions"
ASK = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
SPOKEN = "Hello there \u00e9!"


def events(text: str) -> list[Any]:
    """Payloads of an SSE body, which must end with [DONE]."""
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


async def post(stage: Any, path: str, **body: Any) -> Any:
    return await stage.client.post(path, json={**ASK, **body})


@pytest.mark.parametrize("path", [CHAT, COMP])
async def test_a_stream_joins_to_the_plain_answer(stage: Any, path: str) -> None:
    logprobs = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    body = {"n": 2, "return_token_ids": True, "return_speculation": True, **logprobs}
    async with stage() as s:
        plain = (await post(s, path, **body)).json()
        answer = await post(s, path, stream=True, stream_options={"include_usage": True}, **body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events(answer.text)
    for choice in plain["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        texts = [c["delta"].get("content", "") if path == CHAT else c["text"] for c in mine]
        whole = choice["message"]["content"] if path == CHAT else choice["text"]
        assert "".join(texts) == whole == SPOKEN
        assert [t for c in mine for t in c.get("token_ids", [])] == choice["token_ids"]
        key = "content" if path == CHAT else "tokens"
        assert [e for c in mine if c["logprobs"] for e in c["logprobs"][key]] == choice["logprobs"][key]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"] == [choice["finish_reason"]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == plain["usage"]
    assert chunks[-1]["speculation"] == plain["speculation"]
    assert plain["speculation"]["num_draft_tokens"] == 20  # two choices of 6 + 4


async def test_prompt_ids_come_once(stage: Any) -> None:
    async with stage() as s:
        chat = events((await post(s, CHAT, stream=True, n=2, return_token_ids=True)).text)
        text = events((await post(s, COMP, stream=True, n=2, return_token_ids=True)).text)
    assert ["prompt_token_ids" in chunk for chunk in chat] == [True] + [False] * (len(chat) - 1)
    assert sum("prompt_token_ids" in choice for chunk in text for choice in chunk["choices"]) == 2


async def test_usage_counts_each_prompt_once_and_the_prediction_when_sent(stage: Any) -> None:
    async with stage() as s:
        plain = (await s.client.post(COMP, json={"prompt": ["a", "the b"], "n": 2})).json()["usage"]
        guessed = (await post(s, COMP, prediction={"type": "content", "content": "x"})).json()["usage"]
    assert plain["prompt_tokens"] == sum(len(r.prompt) for r in s.engine.requests[:4:2])
    assert plain["prompt_tokens_details"] == {"cached_tokens": 2}
    assert "completion_tokens_details" not in plain
    details = guessed["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 0}


@pytest.mark.parametrize(("speculation", "mode"), [("auto", "prediction"), ("off", "off"), ("suffix", "suffix")])
async def test_the_report_names_what_speculation_meant_where_the_default_is_off(
    stage: Any, speculation: str, mode: str
) -> None:
    async with stage(speculation="off") as s:
        fields = {"prediction": {"type": "content", "content": "x"}, "return_speculation": True}
        answer = await post(s, COMP, speculation=speculation, **fields)
        assert answer.json()["speculation"]["mode"] == mode
        if speculation == "auto":
            plain = await post(s, COMP, return_speculation=True)
            assert plain.json()["speculation"]["mode"] == "off"


async def test_choices_are_ordered_by_prompt_then_sample(stage: Any) -> None:
    async with stage() as s:
        answer = (await s.client.post(COMP, json={"prompt": ["a", "b"], "n": 2, "echo": True})).json()
    assert [r.choice for r in s.engine.requests] == [0, 1, 0, 1]
    assert [c["text"][0] for c in answer["choices"]] == ["a", "a", "b", "b"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_is_plain_json(stage: Any, stream: bool) -> None:
    async with stage() as s:
        s.engine.refusal = QueueFull("full")
        full = await post(s, CHAT, stream=stream)
        s.engine.refusal = EngineDead("dead")
        dead = await post(s, CHAT, stream=stream)
        s.engine.refusal = None
        long = await s.client.post(COMP, json={"prompt": [1] * 200, "stream": stream})
        assert await s.metric("verdraft_requests_rejected_total") == 1
        assert await s.metric('verdraft_request_errors_total{code="rate_limit_exceeded"}') == 1
    assert full.status_code == 429
    assert int(full.headers["retry-after"]) >= 1
    assert (dead.status_code, dead.json()["error"]["code"]) == (503, "engine_dead")
    error = long.json()["error"]
    assert (long.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert error["message"].count("200") == 2


async def test_an_error_before_the_first_byte_has_its_status(stage: Any) -> None:
    async with stage() as s:
        s.engine.words, s.engine.finish = [], TokenSlice(finish="error", error_code="internal_error")
        answers = [await post(s, CHAT, stream=stream) for stream in (False, True)]
        assert await s.metric('verdraft_request_success_total{finished_reason="error"}') == 2
    assert [a.status_code for a in answers] == [500, 500]
    assert answers[0].json() == answers[1].json()


async def test_an_error_after_the_first_byte_is_an_event(stage: Any) -> None:
    async with stage() as s:
        s.engine.hold_at, s.engine.finish = 1, TokenSlice(finish="error", error_code="internal_error")
        waiting = asyncio.create_task(post(s, CHAT, stream=True))
        await s.engine.held()
        s.engine.release.set()
        found = events((await waiting).text)
        assert await s.metric('verdraft_request_errors_total{code="internal_error"}') == 1
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    assert found[-1]["error"]["code"] == "internal_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_at", [0, 2], ids=["before the first token", "later"])
async def test_a_client_that_leaves_ends_the_request(stage: Any, stream: bool, hold_at: int) -> None:
    async with stage() as s:
        s.engine.hold_at = hold_at
        gone = asyncio.Event()
        body = json.dumps({**ASK, "stream": stream, "n": 2}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b""}
        work = asyncio.create_task(s.app(scope, receive, send))
        await s.engine.held(2)
        gone.set()
        await work
        assert s.engine.ended == ["abort", "abort"]
        assert await s.metric("verdraft_requests_aborted_total") == 1
        assert await s.metric('verdraft_request_success_total{finished_reason="abort"}') == 1


async def test_abort_request_ends_a_stream_in_good_order(stage: Any) -> None:
    async with stage() as s:
        s.engine.hold_at = 1
        waiting = asyncio.create_task(post(s, CHAT, stream=True))
        await s.engine.held()
        response_id = s.engine.requests[0].id
        first, second = [await s.client.post("/abort_request", json={"id": response_id}) for _ in range(2)]
        found = events((await waiting).text)
        late = await s.client.post("/abort_request", json={"id": response_id})
    assert first.json() == {"aborted": True}
    assert second.json() in ({"aborted": False}, {"aborted": True})
    assert late.json() == {"aborted": False}
    assert found[-1]["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_takes_too_long(stage: Any, stream: bool) -> None:
    async with stage(request_timeout=0.05) as s:
        s.engine.hold_at = 0
        answer = await post(s, CHAT, stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "request_timeout")
    assert s.engine.ended == ["abort"]


async def test_draining_refuses_and_then_cuts(stage: Any) -> None:
    async with stage() as s:
        s.engine.hold_at = 1
        waiting = asyncio.create_task(post(s, COMP, stream=True))
        await s.engine.held()
        s.lifecycle.on_signal()
        refused = await post(s, COMP)
        states = [(await s.client.get(path)).status_code for path in ("/health", "/ready", "/metrics")]
        await s.lifecycle.drain(0)
        found = events((await waiting).text)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert int(refused.headers["retry-after"]) >= 1
    assert states == [200, 503, 200]
    assert found[0]["choices"][0]["text"] == "Hello"
    assert found[-1]["error"]["code"] == "draining"


@pytest.mark.parametrize("end", ["timeout", "drain"])
async def test_a_body_that_never_comes_ends_with_the_request(stage: Any, end: str) -> None:
    """Half a body once held up a drain, and no time limit counted for it."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if end == "drain":
            s.lifecycle.on_signal()
        await asyncio.sleep(30)
        raise AssertionError("nobody waits so long")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async with stage(request_timeout=0.1 if end == "timeout" else 30) as s, asyncio.timeout(5):
        scope = {"type": "http", "method": "POST", "path": COMP, "headers": [], "query_string": b""}
        request = asyncio.create_task(s.app(scope, receive, send))
        if end == "drain":
            await s.lifecycle.stopping.wait()
            await s.lifecycle.drain(0)
        await request
    assert sent[0]["status"] == 503
    assert {"timeout": b'"request_timeout"', "drain": b'"draining"'}[end] in sent[1]["body"]


@pytest.mark.parametrize("path", [CHAT, COMP])
async def test_what_can_never_fit_is_not_tokenised(stage: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four megabytes once took a worker eleven seconds, and stopped everybody else for up to three of them."""
    monkeypatch.setattr(TextTokenizer, "encode", lambda *_, **__: pytest.fail("tokenised"))
    long = "a" * 4_000_000
    body = {"prompt": long} if path == COMP else {"messages": [{"role": "user", "content": long}]}
    async with stage() as s:
        answers = [await s.client.post(path, json=body)]
        if path == CHAT:
            answers.append(await s.client.post(path, json={"messages": [{"role": "user", "content": ""}] * 1000}))
        else:
            answers.append(await s.client.post(path, json={"prompt": [1] * 1000}))
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == ("prompt" if path == COMP else "messages")
        assert "200" in error["message"]


async def test_a_prediction_is_cut_where_no_output_could_follow_it(stage: Any) -> None:
    prediction = {"type": "content", "content": "x" * 1_000_000}
    async with stage() as s:
        await s.client.post(COMP, json={"prompt": "x", "max_tokens": 9, "prediction": prediction})
        assert len(s.engine.requests[0].prediction) == 16 * 200


async def test_a_bug_is_a_500_without_its_text(stage: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with stage() as s:
        s.engine.refusal = RuntimeError("the prompt was: plumduff")
        answer = await post(s, CHAT)
        assert await s.metric('verdraft_request_errors_total{code="internal_error"}') == 1
    assert answer.status_code == 500
    assert "plumduff" not in answer.text
    assert "unexpected RuntimeError" in caplog.text
    assert "plumduff" not in caplog.text


THINKING = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content.split('</think>')[-1] }}<|end|>\n"
    "{% endfor %}<|start|>assistant\n"
)


@pytest.mark.parametrize("opens", [False, True], ids=["the model opens", "the template opens"])
async def test_thoughts_are_kept_apart(stage: Any, opens: bool) -> None:
    async with stage(template=THINKING + "<think>\n" * opens) as s:
        s.engine.words = ["<think>\n"] * (not opens) + ["hm", ",", "\n", "</think>", "\n\n", "Hello", " the"]
        answer = (await post(s, CHAT, return_token_ids=True)).json()
        chunks = events((await post(s, CHAT, stream=True, return_token_ids=True)).text)
        raw = (await post(s, COMP)).json()["choices"][0]["text"]
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm,", "Hello the")
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert [d["reasoning_content"] for d in deltas if "reasoning_content" in d] == ["hm", ","]
    assert "".join(d.get("content", "") for d in deltas) == "Hello the"
    ids = [t for c in chunks for t in c["choices"][0].get("token_ids", [])]
    assert ids == answer["choices"][0]["token_ids"]
    thought = len("hm,\n") + 7 + 2 * (not opens)  # the closing mark has 7 tokens here; the opening one ends in its last
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}
    assert raw.endswith("hm,\n</think>\n\nHello the")


async def test_a_model_that_does_not_think_says_its_marks(stage: Any) -> None:
    async with stage() as s:
        s.engine.words = ["<think>", "x", "</think>", "y"]
        answer = (await post(s, CHAT)).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "<think>x</think>y", "refusal": None}

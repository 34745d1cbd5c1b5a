"""The whole server, small and real, under bad bodies and clients that leave: its answers stay right, nothing is left.

`make properties` tries many times more.
"""

import asyncio
import copy
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import HealthCheck

from verdraft.scheduler.async_engine import AsyncEngine
from verdraft.server.app import build_app
from verdraft.server.build import build_engine
from verdraft.server.chat_template import ChatTemplate
from verdraft.server.grammars import Grammars
from verdraft.server.lifecycle import Lifecycle
from verdraft.server.requests import Limits
from verdraft.server.service import Service, Text, TextWorkers
from verdraft.server.settings import Settings
from verdraft.server.tokenizer import TextTokenizer
from verdraft.server.tracing import NoTracer

share = settings.default.max_examples
how = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

GREETING = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": [{"type": "text", "text": "hey"}]}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"$ref": "#/$defs/b"}, "minItems": 1, "maxItems": 2},
        "c": {"anyOf": [{"type": "string", "pattern": "^x+$", "maxLength": 3}, {"const": None}]},
        "d": {"type": "number", "multipleOf": 0.5, "minimum": -1, "maximum": 9},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"b": {"enum": [1, "the"]}},
}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
FORCED = {"type": "function", "function": {"name": "f"}}
RESULT_OF_CALL = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "4"}]}
SAMPLING: dict[str, Any] = {
    "max_tokens": 4,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "n": 2,
    "stop": ["the", "x"],
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 3},
    "min_tokens": 1,
    "ignore_eos": True,
    "stop_token_ids": [7],
    "return_token_ids": True,
    "return_speculation": True,
    "speculation": "suffix",
    "prediction": {"type": "content", "content": "the the"},
    "cache_salt": "s",
    "priority": 1,
    "metadata": {"a": "b"},
    "stream": True,
    "stream_options": {"include_usage": True},
}
VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": GREETING, "logprobs": True, "top_logprobs": 2, **SAMPLING}),
    ("/v1/chat/completions", {"messages": [*GREETING, {"role": "assistant", "tool_calls": [CALL]}], "tools": [TOOL]}),
    ("/v1/completions", {"prompt": ["the", "cat"], "echo": True, "logprobs": 2, **SAMPLING}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 0, "echo": True}),
    ("/v1/responses", {"input": "hey", "instructions": "Be kind.", "max_output_tokens": 4, "stream": True}),
    ("/v1/messages", {"messages": GREETING[1:], "system": "Be kind.", "max_tokens": 4, "stop_sequences": ["x"]}),
    ("/v1/chat/completions", {"messages": GREETING, "max_tokens": 9, "response_format": FORM, "stream": True}),
    ("/v1/chat/completions", {"messages": GREETING, "max_tokens": 9, "tools": [TOOL], "tool_choice": FORCED, "n": 2}),
    (
        "/v1/responses",
        {
            "input": [
                *GREETING,
                RESULT_OF_CALL,
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "h"}]},
            ],
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "max_output_tokens": 9,
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [
                *GREETING[1:],
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "4"}]},
            ],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "disabled"},
            "max_tokens": 9,
            "stream": True,
        },
    ),
    ("/v1/messages/count_tokens", {"messages": GREETING[1:], "system": [{"type": "text", "text": "Be kind."}]}),
    ("/tokenize", {"messages": GREETING, "add_generation_prompt": True}),
    ("/tokenize", {"prompt": "the cat"}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/abort_request", {"id": "chatcmpl-1"}),
]
GOOD = {"prompt": "the cat", "max_tokens": 8, "temperature": 0, "return_token_ids": True, "ignore_eos": True}

numbers = st.integers() | st.sampled_from([0, -1, 2**63, -(2**70), 10**400, 1e308, 0.5]) | st.floats(allow_nan=False)
texts = st.text(max_size=8) | st.sampled_from(["", "<|start|>", "\x00", "auto", "none", "required", "json_object"])
odd = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a JSON value but itself."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from places(inner, (*path, key))


@st.composite
def mutated(draw: Any) -> tuple[str, bytes]:
    """A valid body with one to three wounds, or with a few of its bytes changed."""
    path, body = copy.deepcopy(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 3))):
        *outer, key = draw(st.sampled_from([*places(body)] or [("x",)]))
        holder = body
        for step in outer:
            holder = holder[step]
        if isinstance(holder, dict) and draw(st.booleans()):
            holder.pop(key, None)
        else:
            holder[key] = draw(odd)
    raw = json.dumps(body).encode()
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.binary(max_size=3)) + raw[at + draw(st.integers(0, 5)) :]
    return path, raw


class Small:
    """A real engine around a tiny model, and the application."""

    def __init__(self, service: Service, **options: Any) -> None:
        self.engine = service.engine
        self.lifecycle: Lifecycle[Service] = Lifecycle()
        self.lifecycle.ready(service)
        self.app = build_app(Settings(**options), self.lifecycle, NoTracer())
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test", timeout=60)

    async def good(self) -> list[int]:
        answer = await self.client.post("/v1/completions", json=GOOD)
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    async def idle(self) -> None:
        """Nothing runs, waits, holds a block or is tracked; soon."""
        async with asyncio.timeout(20):
            while self.engine.engine.has_work or self.engine._streams or self.lifecycle._live:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await self.engine.reset_caches()  # a turn of the thread: what it was doing is done
        counters = self.engine.counters()
        assert (counters.num_running, counters.num_waiting, counters.kv_blocks_used) == (0, 0, 0)
        self.engine.engine.check_integrity()
        assert not self.engine._groups


@pytest.fixture
def small(byte_level_folder: Path, tiny_model: Callable[..., Path]) -> Callable[..., Any]:
    """async with small(**settings) as s: ..."""
    tokenizer = TextTokenizer(byte_level_folder)
    path = tiny_model("Llama", vocab_size=tokenizer.vocab_size, max_position_embeddings=768)

    @asynccontextmanager
    async def make(**options: Any) -> AsyncIterator[Small]:
        engine = build_engine(Settings(kernels="torch", kv_blocks=144, max_num_seqs=3, max_queue=4), path)
        text = Text(
            tokenizer, ChatTemplate(byte_level_folder, tokenizer), frozenset({2}), Grammars(tokenizer, frozenset({2}))
        )
        limits = Limits(
            model="org/demo",
            vocab_size=tokenizer.vocab_size,
            max_model_len=engine.config.max_model_len,
            test_hooks=True,
        )
        service = Service(limits, engine.config, text, AsyncEngine(engine), TextWorkers(), created=7)
        await service.start()
        made = Small(service, **options)
        async with made.client:
            yield made
        await service.close()

    return make


def check(answer: httpx.Response) -> None:
    """A whole 2xx, or a 4xx with the error object."""
    if answer.is_success:
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert '"internal_error"' not in answer.text
            assert answer.text.endswith("\n\n")
        return
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()
    if error.get("type") == "error":  # /v1/messages speaks its own dialect
        assert set(error["error"]) >= {"type", "message"}
        return
    assert set(error) == {"error"}
    assert set(error["error"]) == {"message", "type", "param", "code"}


def test_every_valid_body_is_valid(small: Callable[..., Any]) -> None:
    """So that the mutations begin at what works."""

    async def run() -> list[tuple[str, int, str]]:
        async with small() as s:
            answers = [(path, await s.client.post(path, json=body)) for path, body in VALID]
            return [(path, answer.status_code, answer.text) for path, answer in answers if not answer.is_success]

    assert asyncio.run(run()) == []


def test_no_bad_body_breaks_anything(small: Callable[..., Any]) -> None:
    with asyncio.Runner() as runner:
        stack = small()
        server = runner.run(stack.__aenter__())
        expected = runner.run(server.good())

        @settings(how, max_examples=share)
        @given(mutated())
        def attack(case: tuple[str, bytes]) -> None:
            path, raw = case
            sent = server.client.post(path, content=raw, headers={"content-type": "application/json"})
            check(runner.run(sent))
            assert runner.run(server.good()) == expected

        attack()
        runner.run(server.idle())
        runner.run(stack.__aexit__(None, None, None))


class Visit:
    """One raw ASGI exchange whose client leaves at a random time, or takes its answer slowly, or stays."""

    def __init__(self, rnd: random.Random, body: dict[str, Any]) -> None:
        self.parts = [json.dumps(body).encode()]
        at = rnd.randrange(len(self.parts[0]))
        self.parts = [self.parts[0][:at], self.parts[0][at:]]
        self.leaves_after = rnd.choice([0, 1, 2, 2, 2, 2])  # parts of the body
        self.leaves_at = rnd.choice([0.0, 0.001, 0.003, 0.01, 5.0])  # seconds after it
        self.slow = rnd.choice([0.0, 0.0, 0.002])  # seconds for each message of the answer
        self.given = 0
        self.left = asyncio.Event()
        self.messages: list[Any] = []

    async def receive(self) -> dict[str, Any]:
        if self.given >= self.leaves_after:
            if self.leaves_after == 2:
                await asyncio.sleep(self.leaves_at)
            self.left.set()
            return {"type": "http.disconnect"}
        self.given += 1
        return {"type": "http.request", "body": self.parts[self.given - 1], "more_body": self.given < 2}

    async def send(self, message: Any) -> None:
        await asyncio.sleep(self.slow)
        self.messages.append(message)

    async def go(self, app: Any, path: str) -> None:
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": headers,
            "query_string": b"",
            "scheme": "http",
        }
        scope |= {
            "http_version": "1.1",
            "server": ("test", 80),
            "client": ("test", 1),
            "root_path": "",
            "raw_path": b"",
        }
        await app(scope, self.receive, self.send)


def random_body(rnd: random.Random) -> tuple[str, dict[str, Any]]:
    path, body = rnd.choice([entry for entry in VALID if entry[0].startswith("/v1/")])
    fault = rnd.choice([None, None, {"kind": "raise"}, {"kind": "nan", "after_tokens": 2}, {"kind": "preempt"}])
    extra = {"fault": fault, "stream": rnd.random() < 0.6, "stream_options": None}
    return path, {**body, **extra, "max_tokens": rnd.randint(1, 30), "ignore_eos": True, "echo": None, "logprobs": None}


async def crowd(server: Small, rnd: random.Random, count: int) -> None:
    """Many visits at once, aborts by id between them, and cache resets."""
    visits = []
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            path, body = random_body(rnd)
            body |= {"top_logprobs": None, "priority": rnd.randint(-1, 1)}
            visits.append(Visit(rnd, body))
            group.create_task(visits[-1].go(server.app, path))
            if rnd.random() < 0.3:
                await asyncio.sleep(rnd.choice([0, 0.001, 0.005]))
            if rnd.random() < 0.3 and server.lifecycle._live:
                await server.client.post("/abort_request", json={"id": rnd.choice(list(server.lifecycle._live))})
            if rnd.random() < 0.1:
                await server.client.post("/reset_prefix_cache")
    for visit in visits:
        starts = [message for message in visit.messages if message["type"] == "http.response.start"]
        assert len(starts) <= 1
        assert visit.left.is_set() or visit.messages[-1].get("more_body", False) is False


def test_clients_that_leave_at_any_stage_leave_nothing_behind(small: Callable[..., Any]) -> None:
    with asyncio.Runner() as runner:
        stack = small(request_timeout=0.3)
        server = runner.run(stack.__aenter__())
        expected = runner.run(server.good())

        @settings(how, max_examples=share // 10)
        @given(st.integers(0, 10**6))
        def come_and_go(seed: int) -> None:
            runner.run(crowd(server, random.Random(seed), 8))
            runner.run(server.idle())
            assert runner.run(server.good()) == expected

        come_and_go()
        runner.run(stack.__aexit__(None, None, None))

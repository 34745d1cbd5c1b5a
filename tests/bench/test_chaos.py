"""The chaos run's judgement: what a restart explains, what nothing explains, and when /health lied."""

import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import httpx
import pytest

from verdraft.bench.chaos import Run, good_body, problems
from verdraft.bench.client import BadAnswer
from verdraft.bench.health import HealthWatch, Sample
from verdraft.bench.hostile import ODD, WRONG_BYTES, Hostile, broken, endless, error_code

GOOD: dict[str, Any] = {
    "errors": [],
    "server_failures": [],
    "health_lies": [],
    "gauges": {"running": 0.0},
    "memory_growth": 0.01,
    "right_by_mode": {"off": 3, "eagle": 1},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"errors": ["x"], "health_lies": ["y", "z"]}, ["1 errors", "2 health_lies"]),
        ({"gauges": {"running": 2.0}}, ["running is 2 at the end"]),
        ({"memory_growth": 0.2}, ["memory grew by 20.0%"]),
        ({"right_by_mode": {"off": 9, "eagle": 0}}, ["no good answer in mode eagle"]),
    ],
)
def test_problems(change: dict[str, Any], words: list[str]) -> None:
    assert problems(GOOD | change, 0.05) == words


@pytest.mark.parametrize(
    ("error", "around", "verdict"),
    [
        (BadAnswer("429: rate_limit_exceeded"), "nothing", "refused"),
        (BadAnswer("error event: {'code': 'draining'}"), "restart", "refused"),
        (httpx.ConnectError("no"), "restart", "server was away"),
        (httpx.ConnectError("no"), "nothing", "error"),
        (BadAnswer("an answer broke off"), "restart", "error"),
        (BadAnswer("an answer broke off"), "storm", "cut by a storm"),
        (BadAnswer("wrong ids [1], expected [2]"), "storm", "error"),
        (BadAnswer("internal_error"), "nothing", "error"),
    ],
)
async def test_a_bad_end_is_excused_only_by_what_explains_it(
    error: Exception, around: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(seconds: float) -> None:
        pass

    monkeypatch.setattr("asyncio.sleep", at_once)
    run = Run(httpx.AsyncClient(), random.Random(0), steady=True)

    async def fail() -> str:
        run.turn(around == "nothing")
        run.changes -= around == "nothing"
        run.storms += around == "storm"
        raise error

    counter: Counter[str] = Counter()
    await run.act(fail, counter)
    assert (list(counter) or ["error"]) == [verdict]
    assert bool(run.errors) is (verdict == "error")


async def test_every_token_of_a_good_answer_is_compared(client: httpx.AsyncClient) -> None:
    run = Run(client, random.Random(0))
    expected = [ord(c) for c in "hello"]
    assert (await run.ask(good_body("hello"), expected)).ids == expected
    with pytest.raises(BadAnswer, match="wrong ids"):
        await run.ask(good_body("hallo"), expected)
    with pytest.raises(BadAnswer, match="4 of 5 ids"):
        await run.ask(good_body("hell"), expected)


async def test_good_clients_use_every_mode_greedy_and_seeded(client: httpx.AsyncClient) -> None:
    run = Run(client, random.Random(0))
    await run.learn()
    assert {seed for _, seed in run.references} == {None, 7}
    for _ in range(60):
        assert await run.ask_good() == "right"
    assert set(run.right) == {"off", "suffix", "auto"}
    run.references = {asked: [1] for asked in run.references}
    with pytest.raises(BadAnswer, match="wrong ids"):
        await run.ask_good()


def test_a_good_request_is_greedy_or_has_a_seed() -> None:
    greedy, seeded = good_body("hello"), good_body("hello", 7)
    assert (greedy["temperature"], greedy.get("seed")) == (0, None)
    assert (seeded["temperature"], seeded["seed"]) == (0.8, 7)


@pytest.mark.parametrize(
    ("samples", "lies"),
    [
        ([(5, ""), (14, "engine_stuck"), (24, "")], 0),
        ([(5, ""), (14, ""), (24, "")], 2),  # a wrong answer, and a freeze without any right one
        ([(5, "engine_stuck"), (14, "engine_stuck")], 1),
        ([(14, "engine_stuck"), (19, ""), (30, "engine_stuck")], 1),
        ([(14, "engine_stuck"), (15, "gone"), (40, "loading")], 0),
        ([(14, "engine_dead"), (15, "engine_stuck")], 1),
        ([(14, "engine_stuck"), (40, "engine_dead"), (41, "gone")], 0),  # a server that stops
    ],
)
def test_health_is_held_to_the_freezes(samples: list[tuple[float, str]], lies: int) -> None:
    found = [Sample(at, at + 0.1, code) for at, code in samples]
    watch = HealthWatch(httpx.AsyncClient(), found, [(0.0, 18.0)])
    assert len(watch.lies()) == lies


def test_an_error_answer_must_have_the_four_keys() -> None:
    body = {"message": "m", "type": "t", "param": None, "code": "c"}
    assert error_code(httpx.Response(400, json={"error": body})) == "c"
    for wrong in ({"error": {}}, {"error": body | {"more": 1}}, [], "x"):
        with pytest.raises(BadAnswer):
            error_code(httpx.Response(500, json=wrong))


async def test_refusals_must_be_the_right_ones() -> None:
    def answers(status: int, code: str) -> Callable[[httpx.Request], httpx.Response]:
        body = {"error": {"message": "m", "type": "t", "param": None, "code": code}}
        return lambda request: httpx.Response(status, json=body)

    async def tried(status: int, code: str) -> str:
        transport = httpx.MockTransport(answers(status, code))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await Hostile(client, random.Random(0), 100).huge_prompt()

    assert await tried(400, "context_length_exceeded") == "context_length_exceeded"
    assert await tried(429, "rate_limit_exceeded") == "rate_limit_exceeded"
    with pytest.raises(BadAnswer):
        await tried(500, "internal_error")


def is_object(raw: bytes) -> bool:
    try:
        return isinstance(json.loads(raw), dict)
    except ValueError:
        return False


def test_bad_bytes_are_never_a_valid_body() -> None:
    """`{"prompt": "Once upon a time"}` was one once, answered with 200."""
    raw = json.dumps(endless()).encode()
    assert is_object(raw)
    for at, byte, cut in product(range(len(raw) // 2), WRONG_BYTES, range(len(raw) - 1)):
        assert not is_object(broken(raw, at, byte, cut))


def test_hostile_acts_are_many_and_bodies_begin_valid() -> None:
    hostile = Hostile(httpx.AsyncClient(), random.Random(0), 100)
    assert len({act.__name__ for act in hostile.acts()}) >= 14
    assert endless(max_tokens=1)["max_tokens"] == 1
    assert None in ODD

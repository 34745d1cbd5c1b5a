"""The soak test's judgement, and the traffic that it makes."""

import random
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from verdraft.bench.client import BadAnswer
from verdraft.bench.prompts import Prompt
from verdraft.bench.soak import Soak, growth, problems, wait_idle
from verdraft.bench.traffic import chat_body, completion_body

PROMPT = Prompt("p", "chat", ({"role": "user", "content": "Hello there."},), 8, "General Kenobi.")
MODES = ("auto", "off", "hispec")
GOOD: dict[str, Any] = {"errors": [], "gauges": {"running": 0.0}, "memory_growth": 0.01, "same_greedy_answer": True}


def test_growth_ignores_the_warm_up() -> None:
    flat = [(float(t), 100 if t < 20 else 1000) for t in range(81)]
    assert growth(flat) == 0
    assert growth([(t, 1000 + 10 * int(t)) for t, _ in flat]) == pytest.approx(1700 / 1300 - 1)
    assert growth([]) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"errors": ["x", "y"]}, ["2 unexpected answers"]),
        ({"gauges": {"running": 0.0, "waiting": 2.0}}, ["waiting is 2 at the end"]),
        ({"memory_growth": 0.2}, ["memory grew by 20.0%"]),
        ({"same_greedy_answer": False}, ["a greedy answer changed during the run"]),
    ],
)
def test_problems(change: dict[str, Any], words: list[str]) -> None:
    assert problems(GOOD | change, 0.05) == words


def test_traffic_has_every_field_and_is_reproducible() -> None:
    def drawn(seed: int) -> list[dict[str, Any]]:
        rng = random.Random(seed)
        return [make(rng, PROMPT, MODES) for _ in range(200) for make in (chat_body, completion_body)]

    bodies = drawn(3)
    assert bodies == drawn(3) != drawn(4)
    fields = {name for body in bodies for name in body}
    assert {"messages", "prompt", "prediction", "n", "seed", "stop", "logprobs", "logit_bias"} <= fields
    assert {body["speculation"] for body in bodies} == set(MODES)
    assert all(body["max_tokens"] >= body.get("min_tokens", 0) for body in bodies)


async def test_errors_are_noted_and_the_run_goes_on(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Soak(client, [PROMPT], random.Random(0))

    async def refuse() -> str:
        raise BadAnswer("500: no")

    actions: list[Callable[[], Awaitable[str]]] = [run.stream, refuse]
    for action in actions:
        await run.act(action)
    assert run.done == {"stream": 1}
    assert run.errors == ["refuse: BadAnswer: 500: no"]


async def test_idle_gauges_are_read(client: httpx.AsyncClient) -> None:
    assert set((await wait_idle(client)).values()) == {0.0}

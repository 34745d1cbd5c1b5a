"""Soak test: minutes of mixed, rude traffic; the server must stay correct, end idle and keep its memory flat.

    python -m verdraft.bench.soak --data DIR --minutes 20 --out soak -- --max-num-seqs 8

Exit code 1 for any unexpected answer, a gauge that is not zero at the end, memory that grows, or a greedy
answer that is not what it was at the start.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from verdraft.bench.client import CHAT, BadAnswer, events, new_client, stream_chat
from verdraft.bench.host import MemoryWatch, add_host_flags, serving
from verdraft.bench.prompts import Prompt, add_data_flags, prompts_of
from verdraft.bench.traffic import chat_body, completion_body

GAUGES = ("verdraft_num_requests_running", "verdraft_num_requests_waiting", "verdraft_kv_cache_usage_perc")
IDLE_TIMEOUT = 30.0  # seconds until the gauges must be zero after the last request
PROBE = {"messages": [{"role": "user", "content": "Count from one to twenty in words."}], "max_tokens": 48}


@dataclass(slots=True)
class Soak:
    """Clients that act at random until the deadline; `done` counts what they did, `errors` what went wrong."""

    client: httpx.AsyncClient
    prompts: Sequence[Prompt]
    rng: random.Random
    modes: Sequence[str] = ("auto",)  # values of `speculation`
    done: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    async def run(self, clients: int, seconds: float) -> None:
        """Returns when every client has finished its last action."""
        deadline = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self.worker(deadline))

    async def worker(self, deadline: float) -> None:
        actions = (self.plain, self.stream, self.stream, self.leave, self.leave_plain, self.abort, self.completion)
        while time.monotonic() < deadline:
            await self.act(self.rng.choice(actions))

    async def act(self, action: Callable[[], Awaitable[str]]) -> None:
        """One action; an error is noted with its name and does not end the run."""
        try:
            self.done[await action()] += 1
        except (BadAnswer, httpx.HTTPError, ValueError, KeyError) as error:
            self.errors.append(f"{action.__name__}: {type(error).__name__}: {error}")
            await asyncio.sleep(1)  # a server that is down must not fill the list

    def body(self) -> dict[str, Any]:
        return chat_body(self.rng, self.rng.choice(self.prompts), self.modes)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self.client.post(path, json=body)
        if response.status_code != 200:
            raise BadAnswer(f"{response.status_code}: {response.text[:300]} for {shown(body)}")
        answer: dict[str, Any] = response.json()
        return answer

    async def plain(self) -> str:
        body = self.body()
        answer = await self.post(CHAT, body)
        if len(answer["choices"]) != body.get("n", 1):
            raise BadAnswer(f"{len(answer['choices'])} choices for {shown(body)}")
        return "plain"

    async def completion(self) -> str:
        await self.post("/v1/completions", completion_body(self.rng, self.rng.choice(self.prompts), self.modes))
        return "completion"

    async def stream(self) -> str:
        await stream_chat(self.client, self.body())
        return "stream"

    async def leave(self) -> str:
        """Close a stream at a random time."""
        try:
            async with asyncio.timeout(self.rng.expovariate(0.5)):
                await stream_chat(self.client, self.body())
        except TimeoutError:
            return "left a stream"
        return "stream"

    async def leave_plain(self) -> str:
        """Close the connection before the answer."""
        try:
            async with asyncio.timeout(self.rng.expovariate(0.5)):
                return await self.plain()
        except TimeoutError:
            return "left a plain request"

    async def abort(self) -> str:
        """Abort by id from another connection, then read the stream to its end."""
        finishes: set[str | None] = set()
        async with self.client.stream("POST", CHAT, json={**self.body(), "stream": True}) as response:
            asked = False
            async for chunk in events(response):
                finishes |= {choice["finish_reason"] for choice in chunk["choices"]}
                if not asked:
                    await self.post("/abort_request", {"id": chunk["id"]})
                asked = True
        return "aborted" if "abort" in finishes else "finished before the abort"


def shown(body: dict[str, Any]) -> str:
    """A request without its texts."""
    return json.dumps({k: v for k, v in body.items() if k not in ("messages", "prompt", "prediction")})


async def gauges(client: httpx.AsyncClient) -> dict[str, float]:
    """Every sample of /metrics, by name and labels."""
    response = await client.get("/metrics")
    families = text_string_to_metric_families(response.text)
    return {"".join((s.name, *s.labels.values())): s.value for f in families for s in f.samples}


async def wait_idle(client: httpx.AsyncClient) -> dict[str, float]:
    """The gauges that must be zero, as soon as they are, or as they still are after IDLE_TIMEOUT."""
    deadline = time.monotonic() + IDLE_TIMEOUT
    while True:
        found = await gauges(client)
        values = {name: found[name] for name in GAUGES}
        if not any(values.values()) or time.monotonic() > deadline:
            return values
        await asyncio.sleep(0.5)


def growth(samples: Sequence[tuple[float, int]]) -> float:
    """Median memory of the last quarter of the time over that of the second quarter, minus 1; 0 without samples."""
    if not samples:
        return 0.0
    first, last = samples[0][0], samples[-1][0]
    quarter = (last - first) / 4
    early = [size for at, size in samples if first + quarter <= at <= first + 2 * quarter]
    late = [size for at, size in samples if at >= last - quarter]
    return median(late) / median(early) - 1 if early else 0.0


def problems(result: dict[str, Any], max_growth: float) -> list[str]:
    """Why the run failed; empty when it passed."""
    found = [f"{len(result['errors'])} unexpected answers"] if result["errors"] else []
    found += [f"{name} is {value:g} at the end" for name, value in result["gauges"].items() if value]
    if result["memory_growth"] > max_growth:
        found.append(f"memory grew by {result['memory_growth']:.1%}")
    if not result["same_greedy_answer"]:
        found.append("a greedy answer changed during the run")
    return found


async def soak(args: argparse.Namespace, url: str, watch: MemoryWatch) -> dict[str, Any]:
    """The run and its result."""
    async with new_client(url) as client:
        modes = (await client.get("/server_info")).json()["speculation_modes"]
        run = Soak(client, prompts_of(args), random.Random(args.seed), modes)
        probe = {**PROBE, "temperature": 0}
        before = await stream_chat(client, probe)
        await run.run(args.clients, args.minutes * 60)
        idle = await wait_idle(client)
        after = await stream_chat(client, probe)
        return {
            "actions": dict(run.done),
            "errors": run.errors,
            "gauges": idle,
            "same_greedy_answer": before.ids == after.ids,
            "memory_growth": growth(watch.samples),
            "memory_peak_bytes": watch.peak,
            "memory_bytes": [size for _, size in watch.samples[:: max(1, len(watch.samples) // 200)]],
        }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="verdraft.bench.soak", description=__doc__.splitlines()[0])
    add_data_flags(parser)
    add_host_flags(parser)
    parser.add_argument("--minutes", type=float, default=20, help="how long")
    parser.add_argument("--clients", type=int, default=12, help="clients at a time")
    parser.add_argument("--max-growth", type=float, default=0.05, help="memory growth that is allowed after warm-up")
    parser.add_argument("--out", default="build/soak", help="writes OUT.json")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    with serving(args) as host, MemoryWatch(host.pid) as watch:
        result = asyncio.run(soak(args, host.url, watch))
    result["problems"] = problems(result, args.max_growth)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{args.out}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k not in ("errors", "memory_bytes")}, indent=1))
    print("\n".join(result["errors"][:20]))
    print("FAILED" if result["problems"] else "passed")
    return int(bool(result["problems"]))


if __name__ == "__main__":
    sys.exit(main())

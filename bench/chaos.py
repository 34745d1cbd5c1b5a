"""Chaos run: hostile clients, injected faults, freezes and restarts, and good clients whose every token is checked.

    python -m verdraft.bench.chaos --minutes 30 --out build/chaos -- --max-num-seqs 8

Exit code 1 for a wrong or unclean answer to a good request, an untrue /health, a bad end of the server, a block that
is still held when all is over, or memory that grows. Restarts stop after two fifths of the time, so that the last
server lives long enough to show its memory.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import httpx

from verdraft.bench.client import CHAT, Answer, BadAnswer, events, new_client
from verdraft.bench.health import FREEZE_SECONDS, HealthWatch, freeze
from verdraft.bench.host import Host, MemoryWatch, ServerFailed, free_port, served_by
from verdraft.bench.hostile import REFUSALS, Act, Hostile, error_code
from verdraft.bench.soak import growth, wait_idle

# A pool that is often full, and small beside what else may grow.
FLAGS = ("--max-num-seqs", "8", "--max-queue", "24", "--kv-blocks", "1024", "--drain-timeout", "20")
RESTARTS_UNTIL = 0.4  # of the run
LIFE_SECONDS = (15, 60)  # from ready to the signal, for all but the last server
PAUSE = 0.05  # seconds between a client's acts
QUESTIONS = (
    "Count from one to twenty in words.",
    "Write a short poem about the sea.",
    "Repeat this line four times: the quick brown fox jumps over the lazy dog.",
    "Name ten animals, one on each line.",
    "Write a Python function that adds two numbers, then one that multiplies them.",
)


SEEDS = (None, 7)  # None: greedy


def good_body(question: str, seed: int | None = None, **fields: Any) -> dict[str, Any]:
    """A chat, streamed with its ids: sampled with a seed, or greedy."""
    messages = [{"role": "user", "content": question}]
    sampling = {"temperature": 0} if seed is None else {"temperature": 0.8, "top_p": 0.95, "seed": seed}
    return {"messages": messages, "max_tokens": 40, "stream": True, "return_token_ids": True, **sampling, **fields}


@dataclass(slots=True)
class Run:
    """One run. `steady` is false from a signal until the next server is ready: then a connection may be refused.

    An answer that has begun must end well even then, unless a storm of signals said that all must end at once.
    """

    client: httpx.AsyncClient
    rng: random.Random
    steady: bool = False
    changes: int = 0  # of `steady`
    storms: int = 0
    started: float = 0.0  # time.monotonic() seconds, when the first server was ready
    modes: Sequence[str] = ()  # values of `speculation` that the server has
    references: dict[tuple[str, int | None], list[int]] = field(default_factory=dict)  # by question and seed
    right: Counter[str] = field(default_factory=Counter)  # answers, by mode
    good: Counter[str] = field(default_factory=Counter)
    hostile: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    num_tokens: int = 0  # checked one by one

    def turn(self, steady: bool) -> None:
        self.steady = steady
        self.started = self.started or time.monotonic()
        self.changes += 1

    async def learn(self) -> None:
        """The server's modes, and the answers that good requests must get: those without speculation, when alone."""
        self.modes = (await self.client.get("/server_info")).json()["speculation_modes"]
        for question, seed in product(QUESTIONS, SEEDS):
            self.references[question, seed] = (await self.ask(good_body(question, seed, speculation="off"), [])).ids

    async def ask(self, body: dict[str, Any], expected: Sequence[int]) -> Answer:
        """Stream a request; every token is compared as it comes. Raises BadAnswer."""
        answer, start = Answer(), time.perf_counter()
        async with self.client.stream("POST", CHAT, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise BadAnswer(error_code(response))
            try:
                async for chunk in events(response):
                    answer.add_chunk(chunk, time.perf_counter() - start)
                    if expected and answer.ids != expected[: len(answer.ids)]:
                        raise BadAnswer(f"wrong ids {answer.ids}, expected {expected}")
            except httpx.HTTPError as error:
                raise BadAnswer(f"an answer broke off: {error!r}") from None
        if expected and answer.ids != expected:
            raise BadAnswer(f"{len(answer.ids)} of {len(expected)} ids")
        return answer

    async def ask_good(self) -> str:
        question, seed, mode = self.rng.choice(QUESTIONS), self.rng.choice(SEEDS), self.rng.choice(self.modes)
        fields: dict[str, Any] = {"speculation": mode}
        if self.rng.random() < 0.3:
            fields["prediction"] = {"type": "content", "content": self.rng.choice(QUESTIONS)}
        answer = await self.ask(good_body(question, seed, **fields), self.references[question, seed])
        self.num_tokens += len(answer.ids)
        self.right[mode] += 1
        return "right"

    async def act(self, act: Act, counter: Counter[str]) -> None:
        """Judge one act: a refusal is fine, and so is whatever a restart explains."""
        changes, storms = self.changes, self.storms
        try:
            counter[await act()] += 1
        except (BadAnswer, httpx.HTTPError, OSError, ValueError, KeyError) as error:
            text = str(error) or type(error).__name__
            restarted = not self.steady or self.changes != changes
            if any(code in text for code in REFUSALS):
                counter["refused"] += 1
            elif restarted and not isinstance(error, BadAnswer):
                counter["server was away"] += 1
            elif self.storms != storms and not text.startswith("wrong ids"):
                counter["cut by a storm"] += 1
            else:
                self.errors.append(f"{act.__name__}: {type(error).__name__}: {text}"[:500])
            await asyncio.sleep(0.5)

    async def client_loop(self, acts: Sequence[Act], counter: Counter[str], deadline: float) -> None:
        while time.monotonic() < deadline:
            await self.act(self.rng.choice(acts), counter)
            await asyncio.sleep(PAUSE)

    async def traffic(self, args: argparse.Namespace, hostile: Hostile, deadline: float) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(args.good):
                group.create_task(self.client_loop((self.ask_good,), self.good, deadline))
            for _ in range(args.hostile):
                group.create_task(self.client_loop(hostile.acts(), self.hostile, deadline))


@dataclass(slots=True)
class Lives:
    """The server's processes, one after another, on one port."""

    run: Run
    command: Sequence[str]
    url: str
    ends: list[str] = field(default_factory=list)  # how each but the last was ended
    failures: list[str] = field(default_factory=list)
    watch: MemoryWatch | None = None  # of the last life

    async def live(self, over: Callable[[], Awaitable[object]], storm: bool) -> None:
        """Start a server, leave it be until `over` returns, end it with one signal, or with several."""
        context = served_by(self.command, self.url, "/ready", {"VERDRAFT_TEST_HOOKS": "1"})
        host = await asyncio.to_thread(context.__enter__)
        try:
            if not self.run.references:
                await self.run.learn()
            self.run.turn(True)
            with MemoryWatch(host.pid) as self.watch:
                await over()
        finally:
            self.run.turn(False)
            await self._end(context, host.pid if storm else None)
        self.ends.append("several signals" if storm else "drained")

    async def _end(self, context: AbstractContextManager[Host], storm_pid: int | None) -> None:
        ending = asyncio.create_task(asyncio.to_thread(context.__exit__, None, None, None))
        if storm_pid is not None:
            self.run.storms += 1
            await asyncio.sleep(0.3)
            await self._storm(storm_pid)
        try:
            await ending
        except ServerFailed as error:
            self.failures.append(str(error)[:1000])

    async def _storm(self, pid: int) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return
            await asyncio.sleep(0.05)


async def supervise(lives: Lives, args: argparse.Namespace, done: asyncio.Event) -> None:
    """Restarts at random in the first part of the run; then one life until `done`."""
    run = lives.run
    while not run.started or time.monotonic() < run.started + RESTARTS_UNTIL * 60 * args.minutes:
        span = run.rng.uniform(*LIFE_SECONDS)
        await lives.live(partial(asyncio.sleep, span), storm=run.rng.random() < 0.5)
    await lives.live(done.wait, storm=False)


async def freezes(run: Run, watch: HealthWatch, every: float, deadline: float) -> None:
    """A freeze now and then, of a server that will not be restarted meanwhile."""
    run_until = deadline - every - 2 * FREEZE_SECONDS

    async def freeze_engine() -> str:
        return await freeze(run.client, watch)

    await asyncio.sleep(RESTARTS_UNTIL * (deadline - run.started))
    while time.monotonic() < run_until:
        await asyncio.sleep(every)
        if run.steady:
            await run.act(freeze_engine, run.hostile)


async def chaos(args: argparse.Namespace) -> dict[str, Any]:
    """The run and its result."""
    url = f"http://127.0.0.1:{free_port()}"
    model = [args.model] if args.model else []
    command = [sys.executable, "-m", "verdraft", "serve", *model, *FLAGS, *args.serve]
    command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    async with new_client(url) as client:
        run = Run(client, random.Random(args.seed))
        lives = Lives(run, command, url)
        watch = HealthWatch(client)
        watching = asyncio.create_task(watch.watch())
        try:
            last = await _everything(args, run, lives, watch)
        finally:
            watching.cancel()
        return last | {
            "good": dict(run.good),
            "right_by_mode": {mode: run.right[mode] for mode in run.modes},
            "tokens_checked": run.num_tokens,
            "hostile": dict(run.hostile),
            "errors": run.errors,
            "restarts": dict(Counter(lives.ends[:-1])),
            "server_failures": lives.failures,
            "freezes": len(watch.spans),
            "health_lies": watch.lies(),
            "health_answers": len(watch.samples),
            "health_slowest_seconds": watch.slowest(),
        }


async def _everything(args: argparse.Namespace, run: Run, lives: Lives, watch: HealthWatch) -> dict[str, Any]:
    """All lives under traffic; what the last server says of itself when nobody asks any more."""
    done = asyncio.Event()
    supervised = asyncio.create_task(supervise(lives, args, done))
    await _steady(run, supervised)  # the first answers must be there before traffic begins
    deadline = run.started + 60 * args.minutes
    context = (await run.client.get("/server_info")).json()["max_model_len"]
    async with asyncio.TaskGroup() as group:
        group.create_task(run.traffic(args, Hostile(run.client, run.rng, context), deadline))
        group.create_task(freezes(run, watch, args.freeze_every, deadline))
    await _steady(run, supervised)
    idle = await wait_idle(run.client)
    assert lives.watch is not None
    samples = list(lives.watch.samples)
    done.set()
    await supervised
    sizes = {"memory_growth": growth(samples), "memory_peak_bytes": max((size for _, size in samples), default=0)}
    return {"gauges": idle, **sizes}


async def _steady(run: Run, supervised: asyncio.Task[None]) -> None:
    """Wait until a server is there. Raises what supervision failed with."""
    while not run.steady:
        if supervised.done():
            supervised.result()
        await asyncio.sleep(0.1)


def problems(result: dict[str, Any], max_growth: float) -> list[str]:
    """Why the run failed; empty when it passed."""
    found = [f"{len(result[name])} {name}" for name in ("errors", "server_failures", "health_lies") if result[name]]
    found += [f"{name} is {value:g} at the end" for name, value in result["gauges"].items() if value]
    if result["memory_growth"] > max_growth:
        found.append(f"memory grew by {result['memory_growth']:.1%}")
    return found + [f"no good answer in mode {mode}" for mode, count in result["right_by_mode"].items() if not count]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="verdraft.bench.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30, help="how long")
    parser.add_argument("--good", type=int, default=3, help="good clients")
    parser.add_argument("--hostile", type=int, default=6, help="hostile clients")
    parser.add_argument("--freeze-every", type=float, default=75, help="seconds between freezes of the engine")
    parser.add_argument("--max-growth", type=float, default=0.05, help="memory growth that is allowed after warm-up")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--model", help="MODEL of `verdraft serve` (default: the demo model)")
    parser.add_argument("--out", default="build/chaos", help="writes OUT.json")
    parser.add_argument("serve", nargs="*", metavar="-- FLAG", help="more flags for `verdraft serve`, after --")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    result = asyncio.run(chaos(args))
    result["problems"] = problems(result, args.max_growth)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{args.out}.json").write_text(json.dumps(result, indent=1) + "\n")
    shown = {name: value[:20] if isinstance(value, list) else value for name, value in result.items()}
    print(json.dumps(shown, indent=1))
    print("FAILED" if result["problems"] else "passed")
    return int(bool(result["problems"]))


if __name__ == "__main__":
    sys.exit(main())

"""verdraft against other engines on the same model: single streams, edits, prefill, and many streams.

    python -m verdraft.bench.peers --setup DIR            # once: an environment for each peer, the model's files
    python -m verdraft.bench.peers --peers DIR --data DATA --out report

Peers take turns in each round and run alone, with the same threads. Every prompt is new to its server, and
answers are greedy. Trust nothing from a busy machine.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from verdraft.bench.client import BadAnswer
from verdraft.bench.host import ServerFailed
from verdraft.bench.peer_kinds import NAMES, Kind, Peer, Setting, kinds
from verdraft.bench.peer_prompts import Messages, PeerPrompts, peer_prompts
from verdraft.bench.peer_report import TITLES, Round, Row, markdown, uneven_prompts
from verdraft.bench.peer_setup import VLLM, Places, set_up
from verdraft.bench.prompts import DataError
from verdraft.bench.report import machine

PER_ROUND = {"chat": 2, "edit": 2, "agentic": 2, "structured": 2, "prefill": 1}  # prompts
FOLDER = "build/peers"


async def run(args: argparse.Namespace, chosen: Sequence[Kind], prompts: PeerPrompts) -> list[Row]:
    """All rounds. A peer that fails has the reason in its row, and the others go on."""
    rows = [Row(k.peer, k.speculation, k.precision) for k in chosen]
    setting = Setting(Places(Path(args.peers)), args.threads, max(args.streams))
    for number in range(args.rounds):
        for kind, row in zip(chosen, rows, strict=True):
            begin = time.monotonic()
            try:
                await one_round(args, kind, setting, plan(prompts, number), row)
            except (BadAnswer, ServerFailed, httpx.HTTPError, OSError) as error:
                row.failures.append(f"round {number + 1}: {error!r}")
            note = row.failures[-1] if row.failures else f"{time.monotonic() - begin:.0f} s"
            print(f"round {number + 1}: {kind.peer} ({kind.speculation}): {note}", file=sys.stderr, flush=True)
    return rows


def plan(prompts: PeerPrompts, number: int) -> dict[str, list[Messages]]:
    """The prompts of one round, by task; every round has others until they are used up."""
    lists = {task: prompts.long if task == "prefill" else getattr(prompts, task) for task in PER_ROUND}
    return {
        task: [lists[task][(number * count + i) % len(lists[task])] for i in range(count)]
        for task, count in PER_ROUND.items()
    } | {"streams": prompts.streams}


async def one_round(
    args: argparse.Namespace, kind: Kind, setting: Setting, tasks: dict[str, list[Messages]], row: Row
) -> None:
    """Start a peer, warm it up, measure every task, stop it."""
    with kind.start(setting) as peer:
        await peer.ask([[{"role": "user", "content": "Hello"}]], 4, False)
        for task in TITLES:
            limit = 1 if task == "prefill" else args.max_tokens
            rounds = [await measured(peer, [prompt], limit, False) for prompt in tasks[task]]
            row.rounds.setdefault(task, []).extend(rounds)
        for streams in args.streams if kind.batches else ():
            found = await measured(peer, tasks["streams"][:streams], max(1, args.max_tokens * 3 // 8), True)
            row.rounds.setdefault(str(streams), []).append(found)


async def measured(peer: Peer, prompts: Sequence[Messages], max_tokens: int, ignore_eos: bool) -> Round:
    start = time.perf_counter()
    timings = await peer.ask(prompts, max_tokens, ignore_eos)
    return Round(timings, time.perf_counter() - start)


def save(args: argparse.Namespace, rows: Sequence[Row], seconds: float) -> str:
    """OUT.json and OUT.md; returns the latter's text."""
    report: dict[str, Any] = {
        "machine": machine(),
        "options": vars(args),
        "seconds": seconds,
        "rows": [r.summary() for r in rows],
        "uneven_prompts": uneven_prompts(rows),
    }
    text = markdown(report, rows, [*TITLES, *map(str, args.streams)])
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{args.out}.json").write_text(json.dumps(report, indent=1) + "\n")
    Path(f"{args.out}.md").write_text(text)
    return text


def numbers(text: str) -> list[int]:
    """ "8,16" as numbers."""
    return [int(part) for part in text.split(",")]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="verdraft.bench.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--setup", metavar="DIR", help="create environments and model files there, and end")
    parser.add_argument("--peers", metavar="DIR", default=FOLDER, help="folder that --setup filled")
    parser.add_argument("--data", default="", help="folder with chat.jsonl, edit.jsonl, long.jsonl for more prompts")
    default = ",".join(n for n in NAMES if n != VLLM)
    parser.add_argument("--only", default=default, help=f"of {', '.join(NAMES)} (vllm is large and starts slowly)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each peer")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer of one stream")
    parser.add_argument("--streams", type=numbers, default=[8, 16], help="streams at a time")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of every peer")
    parser.add_argument("--out", default="build/peers-report", help="writes OUT.json and OUT.md")
    args = parser.parse_args()
    args.only = args.only.split(",")
    if unknown := set(args.only) - set(NAMES):
        parser.error(f"--only: no such peer: {', '.join(sorted(unknown))}")
    return args


def main() -> int:
    args = parse_args()
    if args.setup:
        set_up(Places(Path(args.setup)), args.only)
        return 0
    places = Places(Path(args.peers))
    if missing := [p for p in args.only if not places.has(p)]:
        sys.exit(f"{args.peers} has no environment for {', '.join(missing)}: run --setup {args.peers} first")
    try:
        prompts = peer_prompts(args.data)
    except DataError as error:
        sys.exit(str(error))
    if max(args.streams) > prompts.num_streams:
        sys.exit(f"--streams: at most {prompts.num_streams}")
    begin = time.monotonic()
    rows = asyncio.run(run(args, [k for k in kinds() if k.peer in args.only], prompts))
    print(save(args, rows, time.monotonic() - begin))
    return int(any(r.failures for r in rows))


if __name__ == "__main__":
    sys.exit(main())

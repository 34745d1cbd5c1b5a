"""Load generator: the same chats in several modes of speculation, at several concurrencies, as one report.

    python -m verdraft.bench.load --data DIR --baseline --out report -- --max-num-seqs 16

Modes take turns prompt by prompt, so that a noisy machine hits all alike. Answers are greedy and must have
the same token ids in every mode and at every concurrency; the exit code is 1 when they have not.
Every cell has a cache salt of its own: it starts with cold caches, and drafts come from the request's own text and
the cell's answers to other prompts, never from an earlier answer to the same prompt.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from verdraft.bench.client import Answer, new_client, stream_chat
from verdraft.bench.host import Host, MemoryWatch, add_host_flags, serving
from verdraft.bench.prompts import DataError, Prompt, add_data_flags, prompts_of
from verdraft.bench.report import Cell, Mismatch, first_difference, machine, main_table, workload_table
from verdraft.bench.transformers_baseline import Baseline, running

BASELINE = "transformers"


@dataclass(slots=True)
class Load:
    """A run over all cells; `answers` and `mismatches` fill as it goes."""

    client: httpx.AsyncClient
    modes: Sequence[str]
    max_tokens: int
    baseline: Baseline | None = None
    form: dict[str, Any] = field(default_factory=dict)  # more of every request's body
    run_id: str = field(default_factory=lambda: f"bench-{time.time_ns()}")
    first_ids: dict[str, list[int]] = field(default_factory=dict)  # of the first answer to each prompt
    prompt_ids: dict[str, list[int]] = field(default_factory=dict)  # as the server reports them
    mismatches: list[Mismatch] = field(default_factory=list)

    async def run(self, prompts: Sequence[Prompt], concurrencies: Sequence[int]) -> list[Cell]:
        """All cells. Raises BadAnswer and httpx errors."""
        for mode in self.modes:  # a start that nobody measures
            await self.ask(prompts[0], mode, "warm-up")
        return [cell for concurrency in concurrencies for cell in await self.cells(prompts, concurrency)]

    async def cells(self, prompts: Sequence[Prompt], concurrency: int) -> list[Cell]:
        """One cell per mode. The modes' order rotates from block to block."""
        cells = [Cell(mode, concurrency) for mode in self.modes]
        if self.baseline and concurrency == 1:
            cells.append(Cell(BASELINE, 1))
        size = 1 if concurrency == 1 else 2 * concurrency
        for number, start in enumerate(range(0, len(prompts), size)):
            turn = number % len(self.modes)
            for cell in (*cells[turn : len(self.modes)], *cells[:turn], *cells[len(self.modes) :]):
                await self.block(cell, prompts[start : start + size])
        return cells

    async def block(self, cell: Cell, prompts: Sequence[Prompt]) -> None:
        """Some prompts of one cell, `cell.concurrency` at a time."""
        gate = asyncio.Semaphore(cell.concurrency)

        async def one(prompt: Prompt) -> Answer:
            async with gate:
                return await self.ask(prompt, cell.mode, str(cell.concurrency))

        start = time.perf_counter()
        answers = await asyncio.gather(*map(one, prompts))
        cell.wall += time.perf_counter() - start
        cell.answers += answers
        cell.workloads += [p.workload for p in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            self.compare(prompt, cell, answer)

    async def ask(self, prompt: Prompt, mode: str, salt: str) -> Answer:
        """One answer, from the server or from the baseline."""
        limit = min(prompt.max_tokens, self.max_tokens)
        if mode == BASELINE:
            assert self.baseline is not None
            return await asyncio.to_thread(self.baseline.ask, self.prompt_ids[prompt.id], limit)
        body = {"messages": prompt.messages, "max_tokens": limit, "temperature": 0, "speculation": mode, **self.form}
        answer = await stream_chat(self.client, {**body, "cache_salt": f"{self.run_id}-{mode}-{salt}"})
        self.prompt_ids[prompt.id] = answer.prompt_ids
        return answer

    def compare(self, prompt: Prompt, cell: Cell, answer: Answer) -> None:
        """Note where an answer leaves the first one to the same prompt."""
        at = first_difference(self.first_ids.setdefault(prompt.id, answer.ids), answer.ids)
        if at is not None:
            self.mismatches.append(Mismatch(prompt.id, cell.mode, cell.concurrency, at))


def form_of(schema: str) -> dict[str, Any]:
    """The field of a request whose answer the JSON schema in this file describes; "": any text will do."""
    if not schema:
        return {}
    form = {"name": "answer", "schema": json.loads(Path(schema).read_text())}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


async def measure(args: argparse.Namespace, host: Host, baseline: Baseline | None) -> tuple[Load, list[Cell]]:
    async with new_client(host.url) as client:
        load = Load(client, args.modes.split(","), args.max_tokens, baseline, form_of(args.schema))
        prompts = prompts_of(args)[: args.prompts]
        return load, await load.run(prompts, [int(c) for c in args.concurrency.split(",")])


def report_of(args: argparse.Namespace, load: Load, cells: list[Cell], memory: dict[str, int]) -> dict[str, Any]:
    """Everything for the JSON file; mismatches of the server apart from those of the baseline."""
    split: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for mismatch in load.mismatches:
        split[mismatch.mode == BASELINE].append(asdict(mismatch))
    return {
        "machine": machine(),
        "options": vars(args),
        "cells": [c.summary() for c in cells],
        "peak_memory_bytes": memory,
        "mismatches": split[False],
        "differs_from_transformers": split[True],
        "tables": [main_table(cells), workload_table(cells)],
    }


def markdown(report: dict[str, Any]) -> str:
    """The report for people."""
    about = " · ".join(f"{name} {value}" for name, value in report["machine"].items())
    memory = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in report["peak_memory_bytes"].items())
    same = f"Answers that differ between modes: {len(report['mismatches'])}."
    other = f"Answers that differ from transformers': {len(report['differs_from_transformers'])}."
    return "\n\n".join([about, *report["tables"], f"Peak memory: {memory or 'not measured'}. {same} {other}", ""])


def save(out: str, report: dict[str, Any]) -> None:
    """OUT.json and OUT.md."""
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{out}.json").write_text(json.dumps(report, indent=1) + "\n")
    Path(f"{out}.md").write_text(markdown(report))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="verdraft.bench.load", description=__doc__.splitlines()[0])
    add_data_flags(parser)
    add_host_flags(parser)
    parser.add_argument(
        "--modes", default="off,suffix", help="values of `speculation`; the first is the base of ratios"
    )
    parser.add_argument("--concurrency", default="1,2,4,8,16", help="streams at a time")
    parser.add_argument("--prompts", type=int, default=22, help="prompts in each cell")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer")
    base = parser.add_mutually_exclusive_group()  # transformers would answer in any form
    base.add_argument("--baseline", action="store_true", help="measure transformers' generate too")
    base.add_argument("--schema", default="", help="file with the JSON schema that every answer must follow")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of the baseline")
    parser.add_argument("--out", default="build/bench", help="writes OUT.json and OUT.md")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    try:
        prompts_of(args)  # before a server starts for nothing
    except DataError as error:
        sys.exit(str(error))
    with ExitStack() as stack:
        host = stack.enter_context(serving(args))
        baseline = stack.enter_context(running(args.model, args.threads)) if args.baseline else None
        watches = {"verdraft": stack.enter_context(MemoryWatch(host.pid))}
        if baseline:
            watches[BASELINE] = stack.enter_context(MemoryWatch(baseline.pid))
        load, cells = asyncio.run(measure(args, host, baseline))
    report = report_of(args, load, cells, {name: w.peak for name, w in watches.items() if w.peak})
    save(args.out, report)
    print(markdown(report))
    return int(bool(report["mismatches"]))


if __name__ == "__main__":
    sys.exit(main())

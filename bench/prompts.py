"""Prompts from a folder of JSONL files, mixed evenly over workloads. Knows no server."""

import argparse
import json
import os
import random
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from verdraft.spec.features import TokenClasses, classify


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a file: the last message is the user's."""

    id: str
    workload: str
    messages: tuple[dict[str, str], ...]
    max_tokens: int
    reference: str = ""  # a known good answer, "" when there is none

    @property
    def num_chars(self) -> int:
        return sum(len(m["content"]) for m in self.messages)


class DataError(Exception):
    """The folder of prompts is missing, empty or malformed."""


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that choose prompts; read them with `prompts_of`."""
    folder = os.environ.get("VERDRAFT_DATA", "")
    parser.add_argument("--data", default=folder, help="folder of *.jsonl prompts (default: $VERDRAFT_DATA)")
    parser.add_argument("--workloads", default="", help="only these, separated by commas")
    parser.add_argument("--max-prompt-chars", type=int, default=8000, help="leave longer prompts out")
    parser.add_argument("--seed", type=int, default=0, help="which prompts are drawn, and in which order")


def prompts_of(args: argparse.Namespace) -> list[Prompt]:
    """All prompts that the flags admit, in a seeded order that takes one of each workload in turn."""
    wanted = set(filter(None, args.workloads.split(",")))
    found = [p for p in load(args.data) if p.num_chars <= args.max_prompt_chars]
    kept = [p for p in found if not wanted or p.workload in wanted]
    if not kept:
        raise DataError(f"no prompt in {args.data!r} fits --workloads and --max-prompt-chars")
    return mixed(kept, random.Random(args.seed))


def load(folder: str) -> list[Prompt]:
    """Every line of every *.jsonl file in `folder`. Raises DataError."""
    files = sorted(Path(folder).glob("*.jsonl")) if folder else []
    if not files:
        raise DataError(f"--data (or VERDRAFT_DATA) must name a folder of *.jsonl prompts, not {folder!r}")
    return [_prompt(file, number, line) for file in files for number, line in _lines(file)]


def mixed(prompts: list[Prompt], rng: random.Random) -> list[Prompt]:
    """Shuffled within each workload, then one of each workload in turn."""
    workloads: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        workloads.setdefault(prompt.workload, []).append(prompt)
    for group in workloads.values():
        rng.shuffle(group)
    return [p for p in chain.from_iterable(zip_longest(*workloads.values())) if p is not None]


def _lines(file: Path) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(file.read_text().split("\n"), 1) if line.strip()]


def _prompt(file: Path, number: int, line: str) -> Prompt:
    try:
        row: dict[str, Any] = json.loads(line)
        messages = tuple({"role": m["role"], "content": m["content"]} for m in row["messages"])
        return Prompt(row["id"], row["workload"], messages, row.get("max_tokens", 256), str(row.get("reference", "")))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file.name} line {number}: {error!r}; expected id, workload and messages") from error


def token_classes(tokenizer: Any) -> TokenClasses:
    """The flags of every token of a `transformers` tokenizer, as a payoff predictor reads them."""
    return classify([tokenizer.decode([i], skip_special_tokens=True).encode() for i in range(len(tokenizer))])

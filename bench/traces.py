"""Recorded answers as token ids, from a folder of JSONL files or of what `verdraft train exits` collected.

A line is a conversation (`messages`: every turn of the assistant is an answer) or ids (`prompt` and `output`); both may
name a `workload` and an `id`.
"""

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from verdraft.bench.prompts import DataError
from verdraft.spec.replay import RecordedAnswer

HELD_OUT = 5  # every so manieth conversation of a file

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Coder:
    """A model's way from text to ids. What raises, raises ValueError."""

    prompt: Callable[[Messages], list[int]]  # by its template, up to where the assistant begins
    answer: Callable[[str], list[int]]
    eos: frozenset[int]


class TraceReader:
    """Reads one folder; `without` names files, workloads or sources (of collected shards) to leave out."""

    def __init__(self, folder: Path, coder: Coder, longest: int, without: Collection[str] = ()) -> None:
        """`longest`: tokens of prompt and answer together; what is longer is left out. Raises DataError."""
        self.coder, self.longest, self.without = coder, longest, frozenset(without)
        found = sorted([*folder.rglob("*.jsonl"), *folder.rglob("*.safetensors")])
        self.files = [file for file in found if file.stem not in self.without]
        if not self.files:
            raise DataError(f"--data must name a folder with *.jsonl or *.safetensors files, not {str(folder)!r}")

    def groups(self) -> list[list[Path]]:
        """The files by shared store: every JSONL file alone, the shards of one folder together."""
        found: dict[Path, list[Path]] = {}
        for file in self.files:
            found.setdefault(file if file.suffix == ".jsonl" else file.parent, []).append(file)
        return list(found.values())

    def read(self, file: Path) -> Iterator[RecordedAnswer]:
        """One of `files`, in its order. Raises DataError."""
        answers = self._lines(file) if file.suffix == ".jsonl" else self._shard(file)
        for answer in answers:
            fits = answer.prompt and len(answer.output) > 1 and len(answer.prompt + answer.output) <= self.longest
            if fits and answer.workload not in self.without:
                yield answer

    def _lines(self, file: Path) -> Iterator[RecordedAnswer]:
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            try:
                yield from self._line(json.loads(line), file, number)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(
                    f"{file.name} line {number}: expected `messages`, or `prompt` and `output` as ids ({error})"
                ) from error

    def _line(self, line: dict[str, Any], file: Path, number: int) -> Iterator[RecordedAnswer]:
        about = (str(line.get("workload", file.stem)), str(line.get("id", f"{file.stem} {number}")))
        held_out = number % HELD_OUT == 0
        if "messages" not in line:
            prompt, output = tuple(map(int, line["prompt"])), tuple(map(int, line["output"]))
            yield RecordedAnswer(*about, prompt, output, output[-1:] in {(eos,) for eos in self.coder.eos}, held_out)
            return
        for prompt, output in self._answers(line["messages"]):
            yield RecordedAnswer(*about, prompt, output, held_out=held_out)

    def _answers(self, messages: list[dict[str, Any]]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Every turn of the assistant behind what came before it, while that is not too long."""
        end = sorted(self.coder.eos)[:1]
        said = [{"role": message["role"], "content": message["content"]} for message in messages]
        for number, message in enumerate(said):
            if message["role"] != "assistant" or number == 0:
                continue
            prompt = self.coder.prompt(said[:number])
            if len(prompt) > self.longest:
                return
            yield tuple(prompt), (*self.coder.answer(message["content"]), *end)

    def _shard(self, file: Path) -> Iterator[RecordedAnswer]:
        """Rows of `next`, `own` and `sequence`. A list in sources.json beside it, named as the shard's beginning
        (train-0003: `train`), may tell the source of every sequence."""
        try:
            with safe_open(file, "np") as rows:
                sequence, tokens, own = (rows.get_tensor(name) for name in ("sequence", "next", "own"))
        except Exception as error:  # the library raises kinds of its own
            raise DataError(f"{file}: expected columns `next`, `own` and `sequence` ({error})") from error
        sources = self._sources(file)
        for number in sorted(set(sequence.tolist())):
            prompt, output = (tuple(tokens[(sequence == number) & kind].tolist()) for kind in (~own, own))
            ended = bool(output) and output[-1] in self.coder.eos
            source = sources[number] if number < len(sources) else file.parent.name
            if source not in self.without:
                name = f"{file.parent.name} {file.stem.split('-')[0]} {number}"
                yield RecordedAnswer("own", name, prompt, output, ended, number % HELD_OUT == 0)

    def _sources(self, file: Path) -> list[str]:
        beside = file.with_name("sources.json")
        if not beside.is_file():
            return []
        lists = json.loads(beside.read_text(encoding="utf-8"))
        found: list[str] = lists.get(file.stem.split("-")[0], [])
        return found

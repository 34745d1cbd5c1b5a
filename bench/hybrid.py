"""`python -m verdraft.bench.hybrid [MODEL] --data FOLDER`: what each way to speculate brings, by workload and streams.

Every arm is an engine of its own that keeps what it learns. All share the model and take turns of a quarter of a
second, so that a noisy machine hits all alike; a stream that has its answer goes on with the next prompt. Decoding and
prefill count. Every arm drafts from earlier answers to other prompts only, and the run fails when two arms differ about
a token.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoTokenizer

from verdraft.bench.hispec import Workloads, exits_of, read_workloads
from verdraft.bench.kernel_flags import add_kernel_flags, kernels_of
from verdraft.bench.prompts import add_data_flags, token_classes
from verdraft.bench.timing import CPU, add_time_flags, use_time_flags
from verdraft.model.eagle_file import shipped_eagle
from verdraft.model.load import load_model
from verdraft.model.source import resolve_model
from verdraft.model.transformer import Transformer
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.costs import LONG
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.estimates import Estimates, PredictorCounts
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Mode, Request, Router
from verdraft.spec.predictor import load_predictor

BLOCK = 16
TURN = 0.25  # seconds
ARMS: dict[str, tuple[Mode, Router]] = {
    "off": ("off", "payoff"),
    "suffix": ("suffix", "payoff"),
    "early_exit": ("early_exit", "payoff"),
    "hispec": ("hispec", "payoff"),
    "eagle": ("eagle", "payoff"),
    "threshold": ("hybrid", "threshold"),
    "score": ("hybrid", "score"),
    "payoff": ("hybrid", "payoff"),
}
SHORT_ARMS = ["off", "suffix", "early_exit", "eagle", "threshold", "payoff"]


@dataclass(slots=True)
class Cell:
    """Sums of one arm on one workload at one number of streams."""

    seconds: float = 0.0
    tokens: int = 0
    cycles: int = 0  # target passes of single sequences
    accepted: int = 0
    drafts: int = 0

    @property
    def rate(self) -> float:
        """Tokens a second, of all streams."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def cycles_per_thousand(self) -> float:
        """Full-depth passes for 1,000 tokens of one sequence."""
        return 1000 * self.cycles / max(1, self.tokens)

    @property
    def accepted_len(self) -> float:
        """Mean tokens kept per verified draft, the bonus included."""
        return 1 + self.accepted / max(1, self.drafts)

    def add(self, other: "Cell") -> None:
        """Sum up."""
        for name in ("seconds", "tokens", "cycles", "accepted", "drafts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Run:
    """One arm answering requests, `streams` at a time."""

    def __init__(self, engine: Engine, requests: Sequence[Request], streams: int) -> None:
        self.outputs: dict[str, list[int]] = {request.id: [] for request in requests}
        self.seconds = 0.0
        self._engine, self._waiting, self._streams = engine, list(requests), streams
        self._before = _counts(engine)

    @property
    def ended(self) -> bool:
        return not (self._waiting or self._engine.has_work)

    def go_on(self, seconds: float) -> None:
        """Steps for about so long, or until all is answered."""
        began, ends = time.perf_counter(), time.perf_counter() + seconds
        while not self.ended and time.perf_counter() < ends:
            self._step()
        self.seconds += time.perf_counter() - began

    def _step(self) -> None:
        scheduler = self._engine.scheduler
        while self._waiting and len(scheduler.running) + len(scheduler.waiting) < self._streams:
            self._engine.add(self._waiting.pop(0))
        for request, piece in self._engine.step():
            self.outputs[request.id] += piece.tokens

    def cell(self) -> Cell:
        """What came of it."""
        cycles, accepted, drafts = (b - a for a, b in zip(self._before, _counts(self._engine), strict=True))
        return Cell(self.seconds, sum(map(len, self.outputs.values())), cycles, accepted, drafts)


@dataclass(slots=True)
class Bench:
    """The engines, and how long and how random their answers are."""

    engines: dict[str, Engine]
    max_tokens: int
    temperature: float = 0.0

    def cells(self, workload: str, prompts: Sequence[Sequence[int]], streams: int) -> dict[str, Cell]:
        """All arms on these prompts. Raises RuntimeError when two arms differ about an answer."""
        salt = f"{workload} {streams}"
        runs = {
            arm: Run(engine, [self._request(i, prompt, arm, salt) for i, prompt in enumerate(prompts)], streams)
            for arm, engine in self.engines.items()
        }
        order = list(runs.values())
        while not all(run.ended for run in order):
            for run in order:
                run.go_on(TURN)
            order.append(order.pop(0))
        first, *others = runs.items()
        for arm, run in others:
            if run.outputs != first[1].outputs:
                raise RuntimeError(f"{arm}: another answer than that of {first[0]}, at {streams} streams")
        return {arm: run.cell() for arm, run in runs.items()}

    def _request(self, number: int, prompt: Sequence[int], arm: str, salt: str) -> Request:
        params = SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=number)
        return Request(id=str(number), prompt=prompt, params=params, speculation=ARMS[arm][0], cache_salt=salt)


def _counts(engine: Engine) -> tuple[int, int, int]:
    counters = engine.counters()
    stats = counters.spec.values()
    return counters.target_passes, sum(s.num_accepted_tokens for s in stats), sum(s.num_drafts for s in stats)


def make_engines(args: argparse.Namespace, model: Transformer, path: Path, longest: int) -> dict[str, Engine]:
    """One engine for each arm that this model can have, with room for as many streams as will be measured."""
    engines: dict[str, Engine] = {}
    exits, eagle = exits_of(args.exits, model, path), shipped_eagle(model, path)
    estimates = Estimates(load_predictor(), token_classes(AutoTokenizer.from_pretrained(path)))
    for arm in args.arms:
        config = EngineConfig(
            max_model_len=longest,
            num_blocks=max(args.streams) * -(-longest // BLOCK),
            block_size=BLOCK,
            max_num_seqs=max(args.streams),
            router=ARMS[arm][1],
            eos_token_ids=model.config.eos_token_ids,
        )
        engine = Engine(model, config, exits=exits, eagle=eagle)
        if ARMS[arm][0] in engine.modes:
            engine.drafting.estimates = replace(estimates, counts=PredictorCounts())
            engine.measure()
            engines[arm] = engine
    return engines


def report(args: argparse.Namespace, bench: Bench, workloads: Workloads) -> Iterator[str]:
    """A table for each number of streams, row by row as it is measured; ratios are to the first arm."""
    for streams in args.streams:
        yield f"\n{streams} streams: tokens/s, its ratio to {args.arms[0]}, cycles per 1,000 tokens, accepted length"
        yield f"{'workload':14}" + "".join(f"{arm:>24}" for arm in args.arms)
        total = {arm: Cell() for arm in args.arms}
        for workload, prompts in workloads.items():
            found = bench.cells(workload, prompts[: max(streams, args.prompts)], streams)
            yield _row(workload, found)
            for arm, cell in found.items():
                total[arm].add(cell)
        yield _row("all", total)


def _row(name: str, cells: dict[str, Cell]) -> str:
    base = next(iter(cells.values())).rate
    columns = [
        f"{cell.rate:6.1f} {cell.rate / base:5.2f}x {cell.cycles_per_thousand:5.0f} {cell.accepted_len:4.2f}"
        for cell in cells.values()
    ]
    return f"{name:14}" + "".join(f"{column:>24}" for column in columns)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="verdraft.bench.hybrid", description=__doc__)
    parser.add_argument("model", nargs="?", help="folder, hub id or .gguf file; default: the demo model")
    parser.add_argument("--exits", default="auto", help="as for `verdraft serve`")
    add_kernel_flags(parser)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="the first is the base")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, default=16, help="of each workload, or as many as streams if more")
    parser.add_argument("--max-tokens", type=int, default=96, help="of every answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="of all answers, each with a seed")
    parser.add_argument("--short", action="store_true", help="about five minutes on two cores: a part of all that")
    add_time_flags(parser)
    add_data_flags(parser)
    args = parser.parse_args()
    if args.short:
        args.arms, args.workloads = SHORT_ARMS, args.workloads or "chat,edit,structured"
        args.prompts, args.max_tokens, args.max_prompt_chars = 4, 48, 2500
    return args


def main() -> None:
    args = parse()
    use_time_flags(args)
    path = resolve_model(args.model)
    model = load_model(path, kernels_of(args), torch.float32, CPU)
    workloads = read_workloads(args, path, max(args.prompts, *args.streams))
    longest = max(len(prompt) for prompts in workloads.values() for prompt in prompts) + args.max_tokens
    longest = max(longest, LONG)  # what reading a context costs can be measured then, as in a server
    engines = make_engines(args, model, path, longest)
    args.arms = list(engines)
    for line in report(args, Bench(engines, args.max_tokens, args.temperature), workloads):
        print(line, flush=True)


if __name__ == "__main__":
    main()

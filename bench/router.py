"""`python -m verdraft.bench.router`: what routers make of recorded answers, offline: cycles per 1,000 tokens and speed.

No model drafts or verifies: suffix drafts are replayed, the model drafter is a chain with given chances, and seconds
are those of passes measured here or given.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from verdraft.bench.online import learning_gain, prediction_seconds
from verdraft.bench.prompts import DataError, token_classes
from verdraft.bench.routers import (
    Machine,
    Outcome,
    Route,
    Router,
    hvd,
    model_only,
    oracle,
    payoff,
    score_threshold,
    suffix_only,
    walk,
)
from verdraft.bench.traces import Coder, Messages, TraceReader
from verdraft.kernels.chooser import choose_kernels
from verdraft.model.config import read_config
from verdraft.model.load import load_model
from verdraft.model.source import resolve_model
from verdraft.scheduler.costs import measure_costs
from verdraft.scheduler.runner import Runner
from verdraft.spec.predictor import PayoffPredictor, load_predictor
from verdraft.spec.replay import States, joined, replay
from verdraft.spec.spending import CostTable

CPU, BLOCK, CONTEXT = torch.device("cpu"), 16, 256
EAGLE3 = (0.43,) * 8  # a chain of depth 8 that alone takes the paper's 571 cycles per 1,000 tokens
PAPER = "HVD, Llama-3.1-8B: 571 cycles per 1,000 tokens with EAGLE3 alone, 200 with HVD (16 data sets, trees)"


def main() -> None:
    """Prints a table of cycles and one of speed, workload by router."""
    args = _parser().parse_args()
    try:
        states = read_states(args)
    except DataError as error:
        raise SystemExit(str(error)) from error
    machine = _machine(args)
    numbers = chosen_answers(states, args.all)
    predictor = load_predictor(args.predictor) if args.predictor else load_predictor()
    outcomes = compare(states, machine, _routers(args.tau, machine, predictor), numbers)
    print(f"passes: {', '.join(f'{n}: {1e3 * s:.1f} ms' for n, s in machine.passes.points())}")
    chances = ", ".join(f"{chance:.2f}" for chance in machine.survival)
    print(f"model drafter: {1e3 * machine.model_token:.2f} ms a token; its first 1, 2, .. are right with {chances}")
    for title, cell in VIEWS:
        print("\n".join(["", title, *_table(outcomes, cell)]))
    print(PAPER)
    print(", ".join(f"{1e6 * prediction_seconds(states, predictor, n):.0f} us to judge {n}" for n in (1, 16)), "drafts")
    print("\n".join(["", "loss of predictions, fixed and learning online", *_gains(states, predictor, numbers)]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m verdraft.bench.router", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of recorded answers")
    parser.add_argument("--model", help="folder, hub id or .gguf file; the demo model when left out")
    parser.add_argument("--predictor", type=Path, help="file; the one that comes with verdraft when left out")
    parser.add_argument("--all", action="store_true", help="all answers, not only those held out in training")
    parser.add_argument("--without", default="", help="files or workloads to leave out, with commas")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of prompt and answer together")
    parser.add_argument("--tau", type=float, default=6.0, help="threshold of score and prediction (HVD: 6)")
    drafter = parser.add_mutually_exclusive_group()
    drafter.add_argument("--head", type=_recorded, help="model drafter: the folder of a head from `train eagle`")
    chances = "model drafter: chance of each token if those before are right"
    drafter.add_argument("--acceptance", type=_chances, default=EAGLE3, help=chances)
    parser.add_argument("--model-token", type=float, default=0.1, help="model drafter: passes of one row, for a token")
    parser.add_argument("--costs", type=_given, help="milliseconds of passes, as 1:7.8,2:9.0; measured when left out")
    parser.add_argument("--streams", type=int, default=1, help="sequences that share every pass")
    return parser


# ---- data


def read_states(args: argparse.Namespace) -> States:
    """Replays the folder. Raises DataError."""
    path = resolve_model(args.model)
    tokenizer: Any = AutoTokenizer.from_pretrained(path, model_max_length=1 << 30)  # the reader looks after lengths
    classes = token_classes(tokenizer)
    without = tuple(filter(None, args.without.split(",")))
    reader = TraceReader(args.data, _coder(tokenizer, read_config(path).eos_token_ids), args.longest, without)
    groups = [(answer for file in group for answer in reader.read(file)) for group in reader.groups()]
    return joined([replay([group], classes) for group in groups])


def _coder(tokenizer: Any, eos: frozenset[int]) -> Coder:
    def prompt(messages: Messages) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def answer(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    return Coder(prompt, answer, eos)


# ---- machine and routers


def _machine(args: argparse.Namespace) -> Machine:
    passes = args.costs or _measured(args.model)
    survival = tuple(accumulate(args.head or args.acceptance, mul))
    return Machine(passes, args.model_token * passes.of(1), survival, args.streams)


def _given(costs: str) -> CostTable:
    try:
        points = sorted((int(n), float(ms) / 1e3) for n, ms in (entry.split(":") for entry in costs.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected rows:milliseconds, as 1:7.8,2:9.0; got {costs!r}") from None
    return CostTable(tuple(n for n, _ in points), tuple(s for _, s in points))


def _chances(text: str) -> tuple[float, ...]:
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(0 <= chance <= 1 for chance in found):
        raise argparse.ArgumentTypeError(f"expected numbers from 0 to 1 with commas, got {text!r}")
    return found


def _recorded(folder: str) -> tuple[float, ...]:
    """What its training found on held-out prompts."""
    try:
        about = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return tuple(map(float, about["verdraft"]["training"]["held_out"]["acceptance"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{folder!r} holds no head with recorded acceptance ({error!r})") from None


def _measured(model: str | None) -> CostTable:
    loaded = load_model(resolve_model(model), choose_kernels("auto", CPU, torch.float32, "auto"), torch.float32, CPU)
    pool = loaded.new_pool(CONTEXT // BLOCK, BLOCK)
    return measure_costs(Runner(loaded, pool, BLOCK, (0, loaded.config.num_layers)), CONTEXT)


def _routers(tau: float, machine: Machine, predictor: PayoffPredictor) -> dict[str, Router]:
    return {
        "none": lambda cycle: Route(),
        "suffix": suffix_only,
        "model": model_only(machine),
        "score": score_threshold(machine, tau),
        "HVD": hvd(machine, predictor, tau),
        "payoff": payoff(machine, predictor),
        "oracle": oracle(machine),
    }


# ---- tables

Outcomes = dict[str, dict[str, Outcome]]  # by workload and router
VIEWS: tuple[tuple[str, Callable[[Outcome, Outcome], str]], ...] = (
    ("cycles per 1,000 tokens", lambda o, none: f"{o.cycles_per_1000:.0f}"),
    ("speed by the cost table, none = 1", lambda o, none: f"{o.speed / none.speed:.2f}x"),
    ("cycles that verify a suffix draft", lambda o, none: f"{o.suffix_cycles / max(1, o.cycles):.0%}"),
    ("drafted tokens a cycle", lambda o, none: f"{o.drafted / max(1, o.cycles):.1f}"),
)


def chosen_answers(states: States, every: bool) -> dict[str, list[int]]:
    """By workload: the numbers of the held-out answers, or of all."""
    chosen: dict[str, list[int]] = {}
    for number, answer in enumerate(states.answers):
        if every or answer.held_out:
            chosen.setdefault(answer.workload, []).append(number)
    return dict(sorted(chosen.items()))


def compare(states: States, machine: Machine, routers: dict[str, Router], numbers: dict[str, list[int]]) -> Outcomes:
    """Every router on the answers of every workload."""
    return {
        workload: {name: walk(states, machine, router, chosen) for name, router in routers.items()}
        for workload, chosen in numbers.items()
    }


def _gains(states: States, predictor: PayoffPredictor, numbers: dict[str, list[int]]) -> Iterator[str]:
    for workload, chosen in numbers.items():
        gain = learning_gain(states, predictor, chosen)
        learnt = f"{gain.num_won} times better, {1e3 * gain.round_seconds:.1f} ms a round"
        yield f"{workload:14}{gain.fixed:9.3f}{gain.learning:9.3f}   {learnt}"


def _table(outcomes: Outcomes, cell: Callable[[Outcome, Outcome], str]) -> list[str]:
    names = list(next(iter(outcomes.values()), {}))
    lines = [f"{'':14}" + "".join(f"{name:>9}" for name in names)]
    for workload, row in [*outcomes.items(), ("all", _summed(outcomes, names))]:
        lines.append(f"{workload:14}" + "".join(f"{cell(row[name], row['none']):>9}" for name in names))
    return lines


def _summed(outcomes: Outcomes, names: list[str]) -> dict[str, Outcome]:
    parts = {name: [row[name] for row in outcomes.values()] for name in names}
    columns = Outcome.__slots__
    return {
        name: Outcome(*np.sum([[getattr(part, column) for column in columns] for part in row], axis=0).tolist())
        for name, row in parts.items()
    }


if __name__ == "__main__":
    main()

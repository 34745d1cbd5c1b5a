"""What a step takes on the host beside its pass: drafting, scheduling, staging, verifying and committing.

    python -m verdraft.bench.steps --streams 16 64 --modes off hybrid --threads 1 --cpu-time

The model is so small that its passes leave the host its caches, and they are not counted. They are said to cost as
much as where a further row hardly counts, so that sources draft as they do there; the vocabulary is small enough for
some of that to be accepted. Half of the requests are greedy, the others sampled.

The floor are facts that every step has to touch once a sequence: its newest token, position and blocks, which a pass is
told; the token found, which goes to its tokens, its stop check and its reader; and its suffix index, which learns that
token and is asked what may follow. All else is once a step, or only where a draft, a penalty or a grammar asks for it.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, get_args

import torch
from numpy.typing import NDArray
from torch import Tensor

from verdraft.bench.gpu_model import TINY, random_model
from verdraft.bench.timing import CPU, add_time_flags, use_time_flags
from verdraft.kernels.chooser import choose_kernels, choose_sampler
from verdraft.kernels.draws import Sampler
from verdraft.model.transformer import Transformer
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.device import Computed, Device, HostDevice, Read
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Mode, Request
from verdraft.spec.predictor import load_predictor
from verdraft.spec.spending import CostTable

SMALL = replace(
    TINY, num_layers=1, vocab_size=32, hidden_size=32, intermediate_size=32, num_heads=1, num_kv_heads=1, head_dim=16
)
COSTS = CostTable((1, 64, 512), (6e-3, 7e-3, 14e-3))
PROMPT, OUTPUT, WARM = 100, 1500, 30  # tokens, tokens, steps


@dataclass(slots=True)
class Stopwatch:
    """The CPU as a device whose passes are timed; with a sampler, it finds tokens itself as a GPU does."""

    sampler: Sampler | None
    passing: float = 0.0  # seconds of all passes
    overlaps: bool = False
    _host: HostDevice = field(default_factory=HostDevice)

    def put(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        return self._host.put(arrays)

    def start(self, work: Callable[[], Computed]) -> Read:
        began = time.perf_counter()
        read = self._host.start(work)
        self.passing += time.perf_counter() - began
        return read

    def fetch(self, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
        return self._host.fetch(tensors)


@dataclass(frozen=True, slots=True)
class Spent:
    """Of one step in which all streams decode."""

    seconds: float  # beside the pass
    tokens: int  # committed


def busy_engine(model: Transformer, mode: Mode, streams: int, device: Device) -> Engine:
    """All streams decode, and have for some steps."""
    page, limit = model.kernels.page_size, PROMPT + OUTPUT
    config = EngineConfig(
        max_model_len=limit,
        num_blocks=streams * -(-limit // page),
        block_size=page,
        max_num_seqs=streams,
        max_batch_tokens=max(256, 32 * streams),
    )
    engine, lot = Engine(model, config, device=device), random.Random(0)
    engine.drafting.measure(COSTS)
    engine.drafting.estimates.use(load_predictor())
    for i in range(streams):
        prompt = [lot.randrange(model.config.vocab_size) for _ in range(PROMPT // 2)] * 2
        params = SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=OUTPUT, ignore_eos=True)
        engine.add(Request(id=str(i), prompt=prompt, params=params, speculation=mode))
    while not all(seq.decoding for seq in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    for _ in range(WARM):
        engine.step()
    return engine


def spend_steps(engine: Engine, device: Stopwatch, steps: int) -> list[Spent]:
    """Steps until one of the streams ends, at most so many."""
    spent: list[Spent] = []
    while len(spent) < steps:
        passing, began = device.passing, time.perf_counter()
        pieces = engine.step()
        seconds = time.perf_counter() - began - (device.passing - passing)
        if any(piece.finish for _, piece in pieces):
            break
        spent.append(Spent(seconds, sum(len(piece.tokens) for _, piece in pieces)))
    return spent


def print_steps(model: Transformer, mode: Mode, streams: int, steps: int, sampler: Sampler | None) -> None:
    """One line of medians."""
    device = Stopwatch(sampler)
    spent = spend_steps(busy_engine(model, mode, streams, device), device, steps)
    seconds, tokens = median(one.seconds for one in spent), sum(one.tokens for one in spent) / len(spent)
    each = f"{1e6 * seconds / streams:7.1f} a sequence,{1e6 * seconds / tokens:7.1f} a token"
    load = f"{mode:8}{streams:5} streams, tokens found by the {'device' if sampler else 'host':7}"
    print(f"{load}{1e6 * seconds:7.0f} us a step,{each}; {tokens / streams:.2f} tokens", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="verdraft.bench.steps", description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", choices=get_args(Mode), default=["off", "suffix", "hybrid"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=200, help="of each line, at most")
    add_time_flags(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    use_time_flags(args)
    kernels = choose_kernels("auto", CPU, torch.float32)
    model = random_model(SMALL, kernels, torch.float32, CPU)
    for sampler in (None, choose_sampler(CPU)):
        for mode in args.modes:
            for streams in args.streams:
                print_steps(model, mode, streams, args.steps, sampler)


if __name__ == "__main__":
    main()

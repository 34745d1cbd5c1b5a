"""What it saves that passes are begun before those before them have ended, on a device that computes by itself.

    python -m verdraft.bench.ahead --pass-ms 6 --streams 1 16 64

No GPU is needed: a thread stands for it, which takes passes in their order and for each at least the time that is
given. The model is tiny. "waits": every pass is begun when the one before it has been committed.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import torch
from numpy.typing import NDArray
from torch import Tensor

from verdraft.bench.gpu_model import random_model
from verdraft.bench.steps import SMALL, busy_engine
from verdraft.bench.timing import CPU
from verdraft.kernels.chooser import choose_kernels, choose_sampler
from verdraft.scheduler.ahead import Lookahead
from verdraft.scheduler.device import Computed, Found, Read, pack
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.request import Mode


class Paced:
    """A device of one thread, of which every pass takes at least so many seconds."""

    overlaps = True

    def __init__(self, seconds: float) -> None:
        self.sampler = choose_sampler(CPU)
        self.working = 0.0  # seconds
        self._seconds = seconds
        self._thread = ThreadPoolExecutor(1)

    def put(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        staged, parts = pack(arrays, pinned=False)
        return parts.of(staged)

    def start(self, work: Callable[[], Computed]) -> Read:
        return self._thread.submit(self._run, work).result

    def fetch(self, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
        return [tensor.numpy() for tensor in tensors]

    def _run(self, work: Callable[[], Computed]) -> Found:
        began = time.perf_counter()
        computed = work()
        time.sleep(max(0.0, began + self._seconds - time.perf_counter()))
        self.working += time.perf_counter() - began
        return computed.found([tensor.numpy() for tensor in computed.readable])


class Waiting(Lookahead):
    """Begins no pass before the one before it has been committed."""

    def waits(self) -> bool:
        return True


def print_engine(name: str, engine: Engine, device: Paced, steps: int) -> None:
    """One line: time, tokens and how much of the time the device worked."""
    working, tokens, done, began = device.working, 0, 0, time.perf_counter()
    while done < steps:
        pieces, done = engine.step(), done + 1
        tokens += sum(len(piece.tokens) for _, piece in pieces)
        if any(piece.finish for _, piece in pieces):
            break
    seconds = time.perf_counter() - began
    print(
        f"{name}{1e3 * seconds / done:7.2f} ms a step,{tokens / seconds:8.0f} tokens/s, "
        f"the device works{100 * (device.working - working) / seconds:4.0f} % of the time",
        flush=True,
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="verdraft.bench.ahead", description=__doc__.splitlines()[0])
    parser.add_argument("--pass-ms", type=float, default=6.0)
    parser.add_argument("--modes", nargs="+", choices=get_args(Mode), default=["off", "hybrid"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=1000, help="of each line, at most: until a stream ends")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    model = random_model(SMALL, choose_kernels("auto", CPU, torch.float32), torch.float32, CPU)
    for mode in args.modes:
        for streams in args.streams:
            for kind, lookahead in (("waits", Waiting), ("as served", Lookahead)):
                device = Paced(args.pass_ms / 1e3)
                engine = busy_engine(model, mode, streams, device)
                engine._lookahead = lookahead(engine.scheduler, engine.drafting)
                print_engine(f"{mode:8}{streams:4} streams, {kind:10}", engine, device, args.steps)


if __name__ == "__main__":
    main()

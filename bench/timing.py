"""What benchmarks share: threads and clock, the best time of a call, and a pass over one sequence."""

import argparse
import time
from collections.abc import Callable

import torch

from verdraft.kernels.base import Batch

CPU = torch.device("cpu")


def add_time_flags(parser: argparse.ArgumentParser) -> None:
    """Have `use_time_flags` obey them."""
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="of this process, not of the wall: on a shared machine")


def use_time_flags(args: argparse.Namespace) -> None:
    """For all of this process: also for what engines measure, so that other work on the machine hardly counts."""
    torch.set_num_threads(args.threads)
    if args.cpu_time:
        vars(time)["perf_counter"] = time.process_time


def seconds(call: Callable[[], object], budget: float = 0.05) -> float:
    """Best time of a call."""
    call()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - begin < budget:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def one_sequence(queries: int, context: int, pages: int) -> Batch:
    positions = torch.arange(context - queries, context)
    return Batch(
        cu_q=torch.tensor([0, queries], dtype=torch.int32),
        seq_lens=torch.tensor([context], dtype=torch.int32),
        pages=torch.arange(pages, dtype=torch.int32).unsqueeze(0),
        slots=positions,
        positions=positions,
        max_q=queries,
        max_k=context,
    )

"""Milliseconds of a model's layer ranges and of its head, by rows in the pass: the costs that the router weighs."""

from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from verdraft.bench.timing import CPU, one_sequence, seconds
from verdraft.kernels.base import Kernels
from verdraft.model.load import load_model
from verdraft.scheduler.costs import SIZES

PAGE = 16


def print_segments(folder: Path, kernels: Kernels, exits: list[int], context: int) -> None:
    """One line per segment between exits, one for the head, one for all; the last of `context` tokens are computed."""
    model = load_model(folder, kernels, torch.float32, CPU)
    config = model.config
    pages = -(-context // PAGE)
    layers, shape = config.num_layers, (pages, PAGE, config.num_kv_heads, config.head_dim)
    pool = kernels.pool(layers, *shape, torch.float32, CPU)
    sizes = [size for size in SIZES if size <= context]
    batches = [one_sequence(size, context, pages) for size in sizes]
    hidden = [model.embed(torch.arange(size), batch.positions) for size, batch in zip(sizes, batches, strict=True)]
    print(f"{'ms for rows':16}" + "".join(f"{size:8}" for size in sizes))
    totals = [0.0] * len(sizes)

    def show(name: str, times: list[float]) -> None:
        totals[:] = [total + t for total, t in zip(totals, times, strict=True)]
        print(f"{name:16}" + "".join(f"{t * 1e3:8.2f}" for t in times), flush=True)

    for a, b in pairwise([0, *exits, layers]):
        passes = [partial(model.forward, x, batch, pool, a, b) for x, batch in zip(hidden, batches, strict=True)]
        show(f"layers [{a}, {b})", [seconds(call, 0.2) for call in passes])
    show("head", [seconds(partial(model.logits, x), 0.2) for x in hidden])
    show("all", list(totals))

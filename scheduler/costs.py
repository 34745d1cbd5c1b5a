"""Measures what a pass costs on this machine, once, before the first request (DESIGN section 6)."""

import time

import numpy as np
import torch

from verdraft.scheduler.runner import Runner, ragged_batch
from verdraft.spec.spending import CostTable

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT = 256  # tokens of context per pass, a typical chat
REPEATS = 5


def measure_costs(runner: Runner, num_blocks: int) -> CostTable:
    """Seconds of a pass over 1 to 128 tokens, the least of five; writes into the pool, which must be unused yet."""
    limit = min(CONTEXT, num_blocks * runner.block_size)
    sizes = tuple(size for size in SIZES if size <= limit)
    seconds = [min(_time(runner, size, limit) for _ in range(REPEATS)) for size in sizes]
    # Fewer rows never cost more than many: what looks so is a disturbance, and would forbid every draft.
    return CostTable(sizes, tuple(np.minimum.accumulate(seconds[::-1])[::-1].tolist()))


@torch.inference_mode()
def _time(runner: Runner, size: int, context: int) -> float:
    num, start = np.array([size]), np.array([context - size])
    tables = np.arange(-(-context // runner.block_size))[None]
    batch = ragged_batch(num, start, tables, runner.block_size, runner.model.device)
    began = time.perf_counter()
    hidden = runner.forward(torch.zeros(size, dtype=torch.int64, device=runner.model.device), batch)
    runner.model.logits(hidden).cpu()
    return time.perf_counter() - began

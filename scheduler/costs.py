"""Measures what a pass costs on this machine, once, before the first request (DESIGN section 6)."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from verdraft.kernels.base import Batch, LayerKV
from verdraft.model.eagle import EagleHead
from verdraft.model.exit_head import Exits
from verdraft.scheduler.batches import ragged_batch
from verdraft.scheduler.runner import Runner
from verdraft.spec.eagle_costs import EagleCosts
from verdraft.spec.exit_costs import ExitCosts
from verdraft.spec.spending import CostTable, Reading

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
CONTEXT = 256  # tokens of context per pass, a typical chat
LONG = 1024  # tokens of another context, which tells what reading it costs
MANY = 8  # rows, whose difference from one tells what each row adds to that
REPEATS = 5
ENOUGH = 0.2  # seconds at one size; at least two runs all the same


def measure_costs(runner: Runner, max_context: int) -> CostTable:
    """Seconds of a pass over 1 to 128 tokens; writes into the pool, which must be unused yet."""
    measure = _Measure(runner, min(CONTEXT, max_context))
    layers = runner.bounds[-1]
    return measure.table(lambda size: measure.whole(size, layers))


def measure_reading(runner: Runner, max_context: int) -> Reading:
    """What contexts longer than that of `measure_costs` add to a pass; nothing where there can be none."""
    short, long = (_Measure(runner, min(context, max_context)) for context in (CONTEXT, LONG))
    beyond, layers = long.context - short.context, runner.bounds[-1]
    if beyond < CONTEXT:
        return Reading()

    def more(size: int) -> float:
        return max(0.0, long.least(size, layers) - short.least(size, layers)) / beyond

    one, many = more(1), more(MANY)
    row = max(0.0, many - one) / (MANY - 1)
    return Reading(max(0.0, one - row), row, short.context)


def measure_exits(runner: Runner, max_context: int, exits: Exits, full: CostTable) -> ExitCosts:
    """Seconds of the lower segments and of the heads; `full` are those of whole passes."""
    measure = _Measure(runner, min(CONTEXT, max_context))
    draft, check = exits.draft, exits.check
    return ExitCosts(
        full=full,
        lowest=measure.table(lambda size: measure.layers(size, 0, draft.layer)),
        middle=measure.table(lambda size: measure.layers(size, draft.layer, check.layer)),
        draft_head=measure.table(lambda size: draft.logits(measure.hidden(size))),
        check_head=measure.table(lambda size: check.logits(measure.hidden(size))),
    )


def measure_eagle(runner: Runner, max_context: int, head: EagleHead, pool: Seq[LayerKV]) -> EagleCosts:
    """Seconds of the parts of an EAGLE drafter with this KV pool."""
    measure = _Measure(runner, min(CONTEXT, max_context))

    def features(size: int) -> torch.Tensor:
        return head.fuse(torch.cat([measure.hidden(size)] * len(runner.taps), 1))

    def layer(size: int, rows: torch.Tensor) -> torch.Tensor:
        tokens = torch.zeros(size, dtype=torch.int64, device=rows.device)
        return measure.finish(head.forward(rows, tokens, measure.batch(size), pool))

    fused = {size: features(size) for size in measure.sizes}
    return EagleCosts(
        extend=measure.table(lambda size: layer(size, features(size))),
        layer=measure.table(lambda size: layer(size, fused[size])),
        head=measure.table(lambda size: head.logits(fused[size])),
    )


class _Measure:
    """Passes over tokens that mean nothing, `context` tokens from the first to the last."""

    def __init__(self, runner: Runner, context: int) -> None:
        self.runner, self.model, self.context = runner, runner.model, context
        self.sizes = tuple(size for size in SIZES if size <= context)

    def table(self, run: Callable[[int], object]) -> CostTable:
        """The least seconds of up to five runs at every size."""
        seconds = [min(_runs(run, size)) for size in self.sizes]
        # Fewer rows never cost more than many: what looks so is a disturbance, and would forbid every draft.
        return CostTable(self.sizes, tuple(np.minimum.accumulate(seconds[::-1])[::-1].tolist()))

    def least(self, size: int, layers: int) -> float:
        """Of up to five whole passes."""
        return min(_runs(lambda size: self.whole(size, layers), size))

    def whole(self, size: int, layers: int) -> None:
        self.model.logits(self.layers(size, 0, layers)).cpu()

    def layers(self, size: int, first: int, last: int) -> torch.Tensor:
        return self.finish(self.model.forward(self.hidden(size), self.batch(size), self.runner.pool, first, last))

    def batch(self, size: int) -> Batch:
        """The last `size` tokens of the context."""
        num, start = np.array([size]), np.array([self.context - size])
        tables = np.arange(-(-self.context // self.runner.block_size))[None]
        return ragged_batch(num, start, tables, self.runner.block_size, self.model.device)

    def hidden(self, size: int) -> torch.Tensor:
        tokens = torch.zeros(size, dtype=torch.int64, device=self.model.device)
        return self.model.embed(tokens, torch.arange(size, device=self.model.device))

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.is_cuda:
            torch.cuda.synchronize(hidden.device)
        return hidden


def _runs(run: Callable[[int], object], size: int) -> list[float]:
    """Seconds of each; few of the long ones, which a disturbance changes less."""
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) < REPEATS and sum(seconds) < ENOUGH):
        seconds.append(_seconds(run, size))
    return seconds


@torch.inference_mode()
def _seconds(run: Callable[[int], object], size: int) -> float:
    began = time.perf_counter()
    run(size)
    return time.perf_counter() - began

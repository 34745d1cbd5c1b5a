"""Measures what a pass costs on this machine, once, before the first request (DESIGN section 6)."""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import cache

import numpy as np
import torch

from verdraft.kernels.base import Batch, LayerKV
from verdraft.kernels.draws import Draws
from verdraft.model.eagle import EagleHead
from verdraft.model.exit_head import Exits
from verdraft.scheduler.batches import place, ragged
from verdraft.scheduler.runner import Runner
from verdraft.spec.eagle_costs import EagleCosts
from verdraft.spec.exit_costs import ExitCosts
from verdraft.spec.spending import CostTable, Reading

SIZES = (1, 8, 32, 2, 128, 4, 16, 64, 3, 6, 12, 24, 20, 26, 48)  # tokens, those first that say most
CONTEXT = 256  # tokens of context per pass, a typical chat
LONG = 1024  # tokens of another context, which tells what reading it costs
MANY = 8  # rows, whose difference from one tells what each row adds to that
REPEATS = 5
ENOUGH = 0.2  # seconds at one size; at least two runs all the same
SECONDS = 10.0  # for all tables of one function here, which a large model on a slow machine cannot fill


def measure_costs(runner: Runner, max_context: int, seconds: float = SECONDS) -> CostTable:
    """Seconds of a pass over 1 to 128 tokens, of fewer sizes where these `seconds` do not suffice; writes into the
    pool, which must be unused yet."""
    measure = _Measure(runner, min(CONTEXT, max_context), seconds)
    layers = runner.bounds[-1]
    return measure.table(lambda size: measure.whole(size, layers))


def measure_reading(runner: Runner, max_context: int, seconds: float = SECONDS) -> Reading:
    """What contexts longer than that of `measure_costs` add to a pass; nothing where there can be none."""
    short, long = (_Measure(runner, min(context, max_context), seconds / 4) for context in (CONTEXT, LONG))
    beyond, layers = long.context - short.context, runner.bounds[-1]
    if beyond < CONTEXT:
        return Reading()

    def more(size: int) -> float:
        return max(0.0, long.least(size, layers) - short.least(size, layers)) / beyond

    one, many = more(1), more(MANY)
    row = max(0.0, many - one) / (MANY - 1)
    return Reading(max(0.0, one - row), row, short.context)


def measure_exits(
    runner: Runner, max_context: int, exits: Exits, full: CostTable, seconds: float = SECONDS
) -> ExitCosts:
    """Seconds of the lower segments and of the heads; `full` are those of whole passes."""
    measure = _Measure(runner, min(CONTEXT, max_context), seconds / 4)
    draft, check = exits.draft, exits.check
    return ExitCosts(
        full=full,
        lowest=measure.table(lambda size: measure.layers(size, 0, draft.layer)),
        middle=measure.table(lambda size: measure.layers(size, draft.layer, check.layer)),
        draft_head=measure.table(lambda size: measure.finish(draft.logits(measure.hidden(size)))),
        check_head=measure.table(lambda size: measure.finish(check.logits(measure.hidden(size)))),
    )


def measure_eagle(
    runner: Runner, max_context: int, head: EagleHead, pool: Seq[LayerKV], seconds: float = SECONDS
) -> EagleCosts:
    """Seconds of the parts of an EAGLE drafter with this KV pool."""
    measure = _Measure(runner, min(CONTEXT, max_context), seconds / 3)

    def features(size: int) -> torch.Tensor:
        return head.fuse(torch.cat([measure.hidden(size)] * len(runner.taps), 1))

    def layer(size: int, rows: torch.Tensor) -> torch.Tensor:
        tokens = torch.zeros(size, dtype=torch.int64, device=rows.device)
        return measure.finish(head.forward(rows, tokens, measure.batch(size), pool))

    fused = cache(features)
    return EagleCosts(
        extend=measure.table(lambda size: layer(size, features(size))),
        layer=measure.table(lambda size: layer(size, fused(size))),
        head=measure.table(lambda size: measure.finish(head.logits(fused(size)))),
    )


class _Measure:
    """Passes over tokens that mean nothing, `context` tokens from the first to the last; about `seconds` a table."""

    def __init__(self, runner: Runner, context: int, seconds: float) -> None:
        self.runner, self.model, self.context, self.seconds = runner, runner.model, context, seconds
        self.sizes = tuple(size for size in SIZES if size <= context)

    def table(self, run: Callable[[int], object]) -> CostTable:
        """The least seconds of up to five runs at every size for which there is time. Sizes take turns: what disturbs
        one run of each changes no table, what disturbs all runs of one size would make its rows look dear."""
        ends, runs = time.perf_counter() + self.seconds, dict[int, list[float]]()
        twice = [size for size in self.sizes for _ in range(2)]  # the first makes what the second finds ready
        for size in (*twice, *self.sizes * (REPEATS - 1)):
            if _has_time(runs, size, ends):
                runs.setdefault(size, []).append(_seconds(run, size))
        sizes = sorted(runs)
        seconds = [min(runs[size]) for size in sizes]
        # Fewer rows never cost more than many: what looks so is a disturbance, and would forbid every draft.
        return CostTable(tuple(sizes), tuple(np.minimum.accumulate(seconds[::-1])[::-1].tolist()))

    def least(self, size: int, layers: int) -> float:
        """Of up to five whole passes."""
        return min(_runs(lambda size: self.whole(size, layers), size, time.perf_counter() + self.seconds))

    def whole(self, size: int, layers: int) -> None:
        """All that a pass is made of, up to what the host reads."""
        logits, sample = self.model.logits(self._forward(size, 0, layers)), self.runner.device.sampler
        (sample(logits, self._draws(size), None) if sample else logits).cpu()

    def layers(self, size: int, first: int, last: int) -> torch.Tensor:
        return self.finish(self._forward(size, first, last))

    def batch(self, size: int) -> Batch:
        """The last `size` tokens of the context."""
        num, start = np.array([size]), np.array([self.context - size])
        tables = np.arange(-(-self.context // self.runner.block_size))[None]
        (batch,), _ = place(self.runner.device, [ragged(num, start, tables, self.runner.block_size)], [])
        return batch

    def hidden(self, size: int) -> torch.Tensor:
        tokens = torch.zeros(size, dtype=torch.int64, device=self.model.device)
        return self.model.embed(tokens, torch.arange(size, device=self.model.device))

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.is_cuda:
            torch.cuda.synchronize(hidden.device)
        return hidden

    def _forward(self, size: int, first: int, last: int) -> torch.Tensor:
        return self.model.forward(self.hidden(size), self.batch(size), self.runner.pool, first, last)

    def _draws(self, size: int) -> Draws:
        """With noise, which costs most."""
        numbers = torch.arange(size, device=self.model.device)
        return Draws(torch.ones(size, dtype=torch.float64, device=self.model.device), numbers, numbers, numbers)


def _has_time(runs: Mapping[int, Seq[float]], size: int, ends: float) -> bool:
    """Whether to run this size (again). A new one takes no longer than in proportion to a smaller one."""
    known = runs.get(size)
    if known:
        return time.perf_counter() + min(known) <= ends and (len(known) < 2 or sum(known[1:]) < ENOUGH)
    expected = [min(seconds) * max(1.0, size / smaller) for smaller, seconds in runs.items()]
    return not expected or time.perf_counter() + min(expected) <= ends


def _runs(run: Callable[[int], object], size: int, ends: float) -> list[float]:
    """Seconds of each; few of the long ones, which a disturbance changes less. The first makes what later ones find
    ready. One alone when it is late already."""
    seconds = [_seconds(run, size)]
    while time.perf_counter() < ends and (len(seconds) < 2 or (len(seconds) < REPEATS and sum(seconds[1:]) < ENOUGH)):
        seconds.append(_seconds(run, size))
    return seconds


@torch.inference_mode()
def _seconds(run: Callable[[int], object], size: int) -> float:
    began = time.perf_counter()
    run(size)
    return time.perf_counter() - began

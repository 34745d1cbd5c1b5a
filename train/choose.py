"""Where exits should sit: the cost model of PAPERS 2.9, fed with replayed cycles and with times measured here."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verdraft.model.exit_head import ExitHead
from verdraft.model.transformer import Transformer
from verdraft.scheduler.batches import ragged_batch
from verdraft.spec.spending import CostTable
from verdraft.train.replay import Cycles

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT = 256
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds by the number of rows: one layer, the target's final norm and head."""

    num_layers: int
    layer: CostTable
    head: CostTable

    def plain(self, batch: int) -> float:
        """A pass that decodes one token of each of `batch` sequences."""
        return self.num_layers * self.layer.of(batch) + self.head.of(batch)


@dataclass(frozen=True, slots=True)
class Exit:
    """Where a head sits and what it costs by the number of rows."""

    layer: int
    head: CostTable


def early_exit_speed(times: Times, draft: Exit, length: int, cycles: Cycles, batch: int = 1) -> float:
    """Tokens per second relative to plain decoding. The first segment takes drafts one by one, and the last of them
    with the pass that verifies all."""
    first = length * (draft.layer * times.layer.of(batch) + draft.head.of(batch)) + draft.layer * times.layer.of(batch)
    rows = batch * (length + 1)
    last = (times.num_layers - draft.layer) * times.layer.of(rows) + times.head.of(rows)
    return cycles.tokens_per_cycle * times.plain(batch) / (first + last)


def hierarchical_speed(times: Times, draft: Exit, check: Exit, inner: int, cycles: Cycles, batch: int = 1) -> float:
    """Tokens per second relative to plain decoding, with the passes that `cycles` counted. Every check, and the pass
    that verifies all, takes one row through the first segment that no draft has taken."""
    layer, between = times.layer.of, check.layer - draft.layer
    drafts, checks = cycles.drafts / cycles.num, cycles.checks / cycles.num
    rows = batch * (cycles.verified / cycles.num + 1)
    first = drafts * draft.head.of(batch) + (drafts + checks + 1) * draft.layer * layer(batch)
    middle = checks * (between * layer(batch * inner) + check.head.of(batch * inner)) + between * layer(batch)
    last = (times.num_layers - check.layer) * layer(round(rows)) + times.head.of(round(rows))
    return cycles.tokens_per_cycle * times.plain(batch) / (first + middle + last)


def measure_times(model: Transformer) -> Times:
    """The least of some passes each; touches no other pool than its own."""
    layers = model.config.num_layers
    block = model.kernels.page_size
    tables = np.arange(-(-CONTEXT // block))[None]
    pool = model.new_pool(tables.size, block)

    def run_layers(hidden: Tensor) -> None:
        num = np.array([len(hidden)])
        batch = ragged_batch(num, CONTEXT - num, tables, block, model.device)
        model.forward(hidden, batch, pool, 0, layers)

    whole = _measure(model, run_layers)
    return Times(
        layers,
        CostTable(whole.tokens, tuple(seconds / layers for seconds in whole.seconds)),
        _measure(model, lambda hidden: model.logits(hidden).cpu()),
    )


def measure_head(model: Transformer, head: ExitHead) -> CostTable:
    """Seconds of a head by its rows."""
    return _measure(model, head.logits)


@torch.inference_mode()
def _measure(model: Transformer, run: Callable[[Tensor], object]) -> CostTable:
    hidden = torch.randn(ROWS[-1], model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    hidden = hidden.to(model.device, model.dtype)
    seconds = [min(_time(run, hidden[:rows].clone()) for _ in range(REPEATS)) for rows in ROWS]
    return CostTable(ROWS, tuple(np.minimum.accumulate(seconds[::-1])[::-1].tolist()))


def _time(run: Callable[[Tensor], object], hidden: Tensor) -> float:
    began = time.perf_counter()
    run(hidden)
    return time.perf_counter() - began

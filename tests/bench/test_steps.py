"""Steps without their passes: what is counted, and that sources have something to do."""

import torch

from verdraft.bench.gpu_model import random_model
from verdraft.bench.steps import SMALL, Stopwatch, busy_engine, spend_steps
from verdraft.bench.timing import CPU
from verdraft.kernels.chooser import choose_kernels


def test_steps_are_counted_until_a_stream_ends() -> None:
    model = random_model(SMALL, choose_kernels("auto", CPU, torch.float32), torch.float32, CPU)
    device = Stopwatch(sampler=None)
    engine = busy_engine(model, "hybrid", 2, device)
    before = engine.totals.generation_tokens
    spent = spend_steps(engine, device, 20)
    assert len(spent) == 20
    assert sum(one.tokens for one in spent) == engine.totals.generation_tokens - before
    assert all(one.seconds > 0 for one in spent)
    assert engine.totals.spec["suffix"].num_accepted_tokens > 0
    assert 20 < len(spend_steps(engine, device, 10_000)) < 1500

"""A thread that stands for a GPU: passes overlap with the host's work in truth, and change no token."""

import torch

from verdraft.bench.ahead import Paced, Waiting
from verdraft.bench.gpu_model import random_model
from verdraft.bench.steps import SMALL, busy_engine
from verdraft.bench.timing import CPU
from verdraft.kernels.chooser import choose_kernels
from verdraft.scheduler.engine import Engine


def tokens_of(engine: Engine, count: int) -> dict[str, list[int]]:
    """The first `count` tokens of every request from now on."""
    found: dict[str, list[int]] = {seq.request.id: [] for seq in engine.scheduler.running}
    while min(map(len, found.values())) < count:
        for request, piece in engine.step():
            found[request.id] += piece.tokens
    return {name: tokens[:count] for name, tokens in found.items()}


def test_passes_in_a_thread_find_the_same_tokens_with_and_without_waiting() -> None:
    model = random_model(SMALL, choose_kernels("auto", CPU, torch.float32), torch.float32, CPU)
    waiting, served = busy_engine(model, "off", 3, Paced(0.0)), busy_engine(model, "off", 3, Paced(0.001))
    waiting._lookahead = Waiting(waiting.scheduler, waiting.drafting)
    starts = {seq.request.id: len(seq.tokens) for seq in waiting.scheduler.running}
    assert starts == {seq.request.id: len(seq.tokens) for seq in served.scheduler.running}
    assert tokens_of(served, 60) == tokens_of(waiting, 60)
    assert served._flights[0].is_ahead
    assert not waiting._flights[0].is_ahead

"""What passes cost, measured at start: tables that make sense whatever the time, of what passes are made of."""

import time

import torch

from verdraft.kernels.draws import Draws
from verdraft.kernels.torch_sampling import law_tokens
from verdraft.scheduler.costs import SIZES, measure_costs
from verdraft.scheduler.device import HostDevice
from verdraft.scheduler.runner import HOST, Runner


def make_runner(hash_model, device=HOST) -> Runner:
    model = hash_model()
    return Runner(model, model.new_pool(16, 16), 16, (0, 2), device=device)


def test_every_size_is_measured_where_there_is_time(hash_model):
    table = measure_costs(make_runner(hash_model), 256)
    assert table.tokens == tuple(sorted(SIZES))
    assert list(table.seconds) == sorted(table.seconds)
    assert table.seconds[0] > 0
    assert measure_costs(make_runner(hash_model), 20).tokens == (1, 2, 3, 4, 6, 8, 12, 16, 20)


def test_a_slow_model_gets_a_short_table_in_time(hash_model):
    """On a loaded machine the table once took minutes of a server's start."""
    runner = make_runner(hash_model)
    runner.model.before_forward = lambda: time.sleep(0.05)
    for seconds, most in ((0.0, 1), (0.5, 5)):
        began = time.perf_counter()
        table = measure_costs(runner, 256, seconds)
        assert time.perf_counter() - began < seconds + 1.0
        assert 1 <= len(table.tokens) <= most
        assert table.tokens[0] == 1
        assert list(table.seconds) == sorted(table.seconds)
        assert 0.05 <= table.of(1) <= table.of(64)


def test_what_the_device_finds_itself_is_not_read_by_the_host(hash_model):
    asked = []

    class Sampling(HostDevice):
        def sampler(self, logits, draws: Draws, token_ids=None, margins=None) -> torch.Tensor:
            asked.append(len(logits))
            return law_tokens(logits, draws, token_ids)

    measure_costs(make_runner(hash_model, Sampling()), 256)
    assert set(asked) == set(SIZES)

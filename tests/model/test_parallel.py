"""Processes that compute together, when one of them fails: nobody waits for ever."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from verdraft.kernels.base import Batch
from verdraft.model.errors import ModelError
from verdraft.model.parallel import Job, LeadingTransformer, load_parallel

SECONDS = 30.0  # far more than a process needs to end
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def shared(tiny_llama_path: Path) -> Iterator[LeadingTransformer]:
    threads = torch.get_num_threads()
    model = load_parallel(Job(tiny_llama_path, 2, "cpu", "cpu", torch.float32))
    yield model
    model.close()
    assert not dist.is_initialized()
    torch.set_num_threads(threads)


def one_token() -> Batch:
    zero = torch.zeros(1, dtype=torch.int64)
    ends = torch.tensor([0, 1], dtype=torch.int32)
    return Batch(ends, ends[1:], torch.zeros(1, 1, dtype=torch.int32), zero, zero, 1, 1)


def check_ended(model: LeadingTransformer) -> None:
    """All followers, and with them the model."""
    for process in model.followers.processes:
        process.join(SECONDS)
        assert not process.is_alive()
    with pytest.raises(ModelError, match="tensor_parallel: the other processes ended"):
        model.new_pool(4, 16)


@torch.inference_mode()
def test_a_leader_that_fails_leaves_nobody_waiting(shared: LeadingTransformer) -> None:
    """It has no pool for the layers that it has just told the others to compute, so they wait for its part."""
    shared.new_pool(4, 16)
    with pytest.raises(IndexError):
        shared.forward(torch.zeros(1, 64), one_token(), (), 0, 2)
    check_ended(shared)


@torch.inference_mode()
def test_a_follower_that_dies_is_noticed(shared: LeadingTransformer) -> None:
    pool = shared.new_pool(4, 16)
    shared.followers.processes[0].kill()
    with pytest.raises(RuntimeError):
        shared.forward(torch.zeros(1, 64), one_token(), pool, 0, 2)
    check_ended(shared)

"""Processes that compute together, when one of them fails: nobody waits for ever."""

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from verdraft.kernels.base import Batch
from verdraft.model.errors import ModelError
from verdraft.model.followers import Followers
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
    assert not Path(model.meeting.name).exists()
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


def wait_until(true: Callable[[], bool]) -> bool:
    """Whether it became so in time."""
    ends = time.monotonic() + SECONDS
    while not true() and time.monotonic() < ends:
        time.sleep(0.05)
    return true()


def test_a_follower_that_dies_is_noticed_by_whoever_only_waits(shared: LeadingTransformer) -> None:
    """A GPU never hears of it, and would wait for that follower's part."""
    shared.check()
    shared.followers.processes[0].kill()
    assert wait_until(lambda: shared.followers.lost)
    with pytest.raises(ModelError, match="tensor_parallel: the other processes ended"):
        shared.check()


def test_a_group_is_aborted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who watches the processes notices at once that who leads has ended them; two aborts at a time wait for each other
    for ever. On a stand-in for NCCL's group."""
    followers, aborts = Followers(()), []

    class Group:
        def abort(self) -> None:
            aborts.append(followers.lost)
            followers.end()

    torchs = SimpleNamespace(group=SimpleNamespace(WORLD=Group()), get_backend=lambda: "nccl")
    monkeypatch.setattr("verdraft.model.followers.dist", torchs)
    followers.end()
    assert aborts == [True]


def test_the_place_where_processes_met_stays_as_long_as_they_do(shared: LeadingTransformer) -> None:
    """NCCL looks there every second, and where there is nothing it waits for minutes, at the end too."""
    assert list(Path(shared.meeting.name).iterdir())
    shared.followers.end()
    assert list(Path(shared.meeting.name).iterdir())


def test_followers_that_were_told_to_end_are_not_lost(tiny_llama_path: Path) -> None:
    threads = torch.get_num_threads()
    model = load_parallel(Job(tiny_llama_path, 2, "cpu", "cpu", torch.float32))
    torch.set_num_threads(threads)
    model.close()
    for process in model.followers.processes:
        process.join(SECONDS)
        assert process.exitcode == 0
    time.sleep(0.2)
    model.check()


def test_a_follower_that_cannot_load_ends_the_start(tiny_llama_path: Path, tmp_path: Path) -> None:
    """The others are not left behind either."""
    (tmp_path / "config.json").write_text((tiny_llama_path / "config.json").read_text())
    threads = torch.get_num_threads()
    with pytest.raises((ModelError, RuntimeError)):
        load_parallel(Job(tmp_path, 2, "cpu", "cpu", torch.float32))
    torch.set_num_threads(threads)
    assert not dist.is_initialized()
    assert wait_until(lambda: not multiprocessing.active_children())


LEADER = """
import multiprocessing, os, time
from verdraft.model.followers import end_with_leader

def follow():
    end_with_leader()
    print(os.getpid(), flush=True)
    time.sleep(600)

multiprocessing.get_context("fork").Process(target=follow).start()
time.sleep(600)
"""


def test_a_follower_ends_when_its_leader_is_killed() -> None:
    """Whatever it is doing: between GPUs it might wait for the leader for ever."""
    with subprocess.Popen([sys.executable, "-c", LEADER], stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        follower = psutil.Process(int(leader.stdout.readline()))
        leader.kill()
    assert wait_until(lambda: not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE)

"""The processes that compute with a leader: how their end, or the leader's, ends what waits for them.

Over a socket a lost process is an error for whoever talks to it; between GPUs it is nothing, and a kernel would wait
for its part for ever.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection, parent_process
from multiprocessing.process import BaseProcess
from threading import Lock, Thread

import torch.distributed as dist

from verdraft.model.errors import ModelError


@dataclass(slots=True)
class Followers:
    """The processes of ranks 1 and up."""

    processes: Sequence[BaseProcess]
    lost: bool = False
    leaving: bool = False  # they were told to end
    _ending: Lock = field(default_factory=Lock)

    def watch(self) -> None:
        """From now on, the first that ends without being told so takes the others with it."""
        Thread(target=self._watch, name="tensor-parallel", daemon=True).start()

    def check(self) -> None:
        """Raise ModelError when they are gone: what was computed with them since is worth nothing."""
        if self.lost:
            raise ModelError("tensor_parallel: the other processes ended or a pass failed; start the server again")

    @contextmanager
    def led(self) -> Iterator[None]:
        """While the leader tells and computes. What fails in between leaves the followers waiting for a part that never
        comes, and what they would hear next is not what they wait for: they end, and the leader computes no more."""
        self.check()
        try:
            yield
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Whatever they are doing, and whatever here waits for them."""
        # Once: two aborts of one group at a time, by who leads and by who watches, wait for each other for ever.
        with self._ending:
            ended, self.lost = self.lost, True  # first: who stops waiting has to know why
        if ended:
            return
        for process in self.processes:
            process.kill()
        group = dist.group.WORLD
        if group is not None and dist.get_backend() == "nccl":
            group.abort()

    def _watch(self) -> None:
        connection.wait([process.sentinel for process in self.processes])
        if not self.leaving:
            self.end()


def end_with_leader() -> None:
    """Let this process end when the one that started it has, even by force."""
    leader = parent_process()
    assert leader is not None, "nobody started this process"
    Thread(target=_end_after, args=(leader.sentinel,), name="leader", daemon=True).start()


def _end_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)  # the others may be deep in a call that never returns

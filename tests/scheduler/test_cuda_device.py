"""The way to a GPU and back, on stand-ins for torch's calls that do no more than its documentation promises: a copy
that nobody waits for happens when an event behind it is waited for, and only from or to page-locked memory."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from verdraft.scheduler.device import Computed, CudaDevice

CPU = torch.device("cpu")


class LateCopies:
    """In place of torch.empty, Tensor.to, Tensor.copy_ and torch.cuda.Event."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.locked: list[Tensor] = []
        self.pending: list[Callable[[], object]] = []
        empty, copy, late = torch.empty, Tensor.copy_, self

        def make(*args: object, pin_memory: bool = False, **options: object) -> Tensor:
            tensor = empty(*args, **options)
            self.locked += [tensor] if pin_memory else []
            return tensor

        def send(host: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
            assert non_blocking
            assert self.is_locked(host)
            there = host.clone().fill_(0xA5)
            self.pending.append(lambda: copy(there, host))
            return there

        def fetch(host: Tensor, there: Tensor, non_blocking: bool = False) -> Tensor:
            if not non_blocking:
                return copy(host, there)
            assert not host.numel() or self.is_locked(host)
            host.fill_(77)
            found = there.clone()
            self.pending.append(lambda: copy(host, found))
            return host

        class Event:
            def record(self) -> None:
                self.behind = list(late.pending)

            def synchronize(self) -> None:
                for happen in self.behind:
                    happen()

        patch.setattr(torch, "empty", make)
        patch.setattr(Tensor, "to", send)
        patch.setattr(Tensor, "copy_", fetch)
        patch.setattr(torch.cuda, "Event", Event)

    def is_locked(self, tensor: Tensor) -> bool:
        return any(tensor is locked for locked in self.locked)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    return LateCopies(monkeypatch)


def test_what_was_put_may_change_before_it_is_there(late: LateCopies) -> None:
    arrays = [np.arange(5, dtype=np.int32), np.ones((2, 3)), np.empty(0, np.int64)]
    expected = [array.copy() for array in arrays]
    tensors = CudaDevice(CPU).put(arrays)
    for array in arrays:
        array.fill(-1)
    assert len(late.pending) == 1, "one copy for everything"
    late.pending.pop()()
    for tensor, array in zip(tensors, expected, strict=True):
        assert np.array_equal(tensor.numpy(), array)


@pytest.mark.parametrize("rows", [0, 3])
def test_results_are_read_when_they_are_there(late: LateCopies, rows: int) -> None:
    """The pass behind may have begun, and overwritten what its results were made from."""
    device = CudaDevice(CPU)
    tokens, logits = torch.arange(4), torch.arange(8.0 * rows).view(rows, 8)
    margins, scores = tokens.double(), torch.arange(9.0).view(3, 3)
    expected = [tokens.tolist(), margins.tolist(), scores.tolist(), logits.tolist()]
    first = device.start(lambda: Computed(tokens, margins, scores, logits, None))
    tokens.fill_(-5)
    margins.fill_(-5)
    scores.fill_(-5.0)
    logits.fill_(-5.0)
    second = device.start(lambda: Computed(tokens[:0], margins[:0], scores[:0], logits, tokens))
    found = first()
    assert [one.tolist() for one in (found.tokens, found.margins, found.scores, found.logits)] == expected
    found = second()
    assert (found.tokens.size, found.logits.shape) == (0, (rows, 8))
    assert found.taps is tokens

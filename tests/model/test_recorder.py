"""What recordings count and leave behind, on stand-ins for torch.cuda that keep books of memory and streams."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from verdraft.model.recordings import CudaRecorder


class Books:
    """Memory that torch has reserved: some lies idle until the cache is emptied, which torch.cuda.graph does first."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.used, self.idle, self.stream = 100, 0, "ours"
        for name, stand_in in {
            "graph_pool_handle": object,
            "synchronize": lambda: None,
            "empty_cache": self.empty,
            "memory_reserved": lambda: self.used + self.idle,
            "current_stream": lambda: self.stream,
            "set_stream": lambda stream: setattr(self, "stream", stream),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "graph": lambda graph, pool, capture_error_mode: self,
        }.items():
            patch.setattr(torch.cuda, name, stand_in)

    def empty(self) -> None:
        self.idle = 0

    def __enter__(self) -> None:
        self.empty()
        self.stream = "the recording's"

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:  # a recording that fails raises before the stream is put back
            self.stream = "ours"


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Books:
    return Books(monkeypatch)


def test_memory_that_lay_idle_is_no_gain(books: Books) -> None:
    """It once hid what recordings took, so that they knew no end."""
    recorder = CudaRecorder(memory=60)

    def work() -> Tensor:
        if books.stream == "ours":
            books.idle += 40  # of the run before the recording
        else:
            books.used += 25
        return torch.ones(1)

    for full in (False, False, True):
        assert not recorder.full
        assert torch.equal(recorder.record(work)(), torch.ones(1))
        books.idle = 40
        assert recorder.full is full


def test_a_recording_that_fails_leaves_us_in_our_own_stream(books: Books) -> None:
    def work() -> Tensor:
        if books.stream != "ours":
            raise RuntimeError("not while recording")
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="not while recording"):
        CudaRecorder().record(work)
    assert books.stream == "ours"

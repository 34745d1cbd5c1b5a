"""How a pass gets to where the model computes, and what it found back to the host. Knows no sequence and no model.

On a CPU both are the same memory and a pass has happened when its call returns. A GPU works behind the host's back: it
gets everything of a pass in one copy from page-locked memory, finds the tokens itself where it can, and is asked for
them only when they are needed, so that the host can do other things meanwhile.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verdraft.kernels.chooser import choose_sampler
from verdraft.kernels.draws import Sampler

Rows = NDArray[np.float32]
_ALIGNED = 16  # bytes: wherever an array may begin


@dataclass(frozen=True, slots=True)
class Computed:
    """What a pass leaves where it was computed."""

    tokens: Tensor  # [D] int64, or draws.BAD, draws.UNSURE: of the rows whose tokens the device finds
    margins: Tensor  # [D] float64, of these in rounding steps (outputs.Margins); [0] where kernels are exact
    scores: Tensor  # [P + S, 1 + 2n] float64: log-probabilities (torch_logprobs.py) of prompts, then of S of these
    logits: Tensor  # [R, V] float32: of the rows whose tokens the host finds, if it does
    taps: Tensor | None  # [T, taps * hidden], to stay there
    held: Tensor | None = None  # [D, V] float32: of the rows whose tokens the device finds, where the host may ask

    @property
    def readable(self) -> list[Tensor]:
        """What the host reads."""
        return [self.tokens, self.margins, self.scores, self.logits]

    def found(self, read: Seq[NDArray[Any]]) -> "Found":
        """With these tensors on the host, in the same order."""
        tokens, margins, scores, logits = read
        return Found(tokens, margins, scores, logits, self.taps, self.held)


@dataclass(frozen=True, slots=True)
class Found:
    """The same, where the host can read it."""

    tokens: NDArray[np.int64]
    margins: NDArray[np.float64]
    scores: NDArray[np.float64]
    logits: Rows
    taps: Tensor | None
    held: Tensor | None


Read = Callable[[], Found]  # waits; raises what went wrong meanwhile


class Device(Protocol):
    """Where the model is. `overlaps`: a pass goes on while the host does something else. `sampler` finds tokens where
    the logits are; None: the host finds them, and no pass can go on without it."""

    @property
    def overlaps(self) -> bool: ...

    @property
    def sampler(self) -> Sampler | None: ...

    def put(self, arrays: Seq[NDArray[np.generic]]) -> list[Tensor]:
        """All of these there; they may be changed when this returns, unless host and device are the same."""
        ...

    def start(self, work: Callable[[], Computed]) -> Read:
        """Let the device do this after all that it was given before. It reads no memory of the host."""
        ...

    def fetch(self, tensors: Seq[Tensor]) -> list[NDArray[Any]]:
        """All of these where the host can read them; waits."""
        ...


class HostDevice:
    """The CPU."""

    overlaps = False
    sampler = None

    def put(self, arrays: Seq[NDArray[np.generic]]) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def start(self, work: Callable[[], Computed]) -> Read:
        computed = work()
        found = computed.found(self.fetch(computed.readable))
        return lambda: found

    def fetch(self, tensors: Seq[Tensor]) -> list[NDArray[Any]]:
        return [tensor.numpy() for tensor in tensors]


class CudaDevice:
    """A GPU. Kernels follow each other in one stream, so nothing waits but the host for what it reads."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self.sampler: Sampler | None = choose_sampler(device)
        self._device = device

    def put(self, arrays: Seq[NDArray[np.generic]]) -> list[Tensor]:
        staged, parts = pack(arrays, pinned=True)
        # torch lends this page-locked memory to nobody else before the copy from it has happened.
        return parts.of(staged.to(self._device, non_blocking=True))

    def start(self, work: Callable[[], Computed]) -> Read:
        computed = work()
        read = _on_its_way(computed.readable)
        return lambda: computed.found(read())

    def fetch(self, tensors: Seq[Tensor]) -> list[NDArray[Any]]:
        return _on_its_way(tensors)()


def _on_its_way(tensors: Seq[Tensor]) -> Callable[[], list[NDArray[Any]]]:
    """Copies of these on the host, for whoever calls what this returns, which waits."""
    hosts, done = [_to_host(tensor) for tensor in tensors], torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def read() -> list[NDArray[Any]]:
        done.synchronize()
        return [host.numpy() for host in hosts]

    return read


def _to_host(tensor: Tensor) -> Tensor:
    """There before whatever is recorded next in the stream."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.numel() > 0)
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Parts:
    """Where in one tensor of bytes each array is."""

    arrays: Seq[NDArray[np.generic]]
    starts: Seq[int]

    def of(self, packed: Tensor) -> list[Tensor]:
        """The arrays again, as views of such a tensor wherever it is."""
        return [self._view(packed, array, start) for array, start in zip(self.arrays, self.starts, strict=True)]

    def _view(self, packed: Tensor, array: NDArray[np.generic], start: int) -> Tensor:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        return packed[start : start + array.nbytes].view(dtype).view(array.shape)


def pack(arrays: Seq[NDArray[np.generic]], pinned: bool) -> tuple[Tensor, Parts]:
    """All arrays in one tensor of bytes [N] on the host, page-locked if asked for."""
    *starts, end = accumulate((-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays), initial=0)
    packed = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
    into = packed.numpy()
    for array, start in zip(arrays, starts, strict=True):
        into[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed, Parts(arrays, starts)


def device_of(place: torch.device) -> Device:
    """What serves a model that is at this place."""
    return CudaDevice(place) if place.type == "cuda" else HostDevice()

"""Memory for weights and KV in pages of 2 MiB where the system has them: reading it all, again and again, then rarely
waits for a page's address. Knows nothing of what lies there."""

import ctypes
import math
import mmap

import torch
from torch import Tensor

_SLAB = 16 << 20  # floats
_ALIGNMENT = 16  # floats, a line of the cache


class HugePages:
    """Gives tensors that lie side by side, so that small ones share pages; a slab lives as long as any of them."""

    def __init__(self) -> None:
        self._free = torch.empty(0)

    def zeros(self, *shape: int) -> Tensor:
        """float32 zeros."""
        numbers = math.prod(shape)
        taken = -(-numbers // _ALIGNMENT) * _ALIGNMENT
        if taken > self._free.numel():
            _trim_heap()
            self._free = _map(max(taken, _SLAB))
        tensor, self._free = self._free[:numbers].view(shape), self._free[taken:]
        return tensor


def _map(floats: int) -> Tensor:
    memory = mmap.mmap(-1, floats * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)


def _trim_heap() -> None:
    """Give back what a loader freed in pieces that glibc does not reuse for aligned requests of the same size."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))

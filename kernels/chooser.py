"""Which backend runs a model: by name, or the best one for a device and float type."""

import torch

from verdraft.kernels.base import Kernels, KernelUnavailable
from verdraft.kernels.torch_ref import TorchKernels

NAMES = ("auto", "torch", "cpu")


def choose_kernels(name: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The backend called `name`; "auto" picks.

    Raises KernelUnavailable when an explicit name is unknown or cannot run on this device and type.
    """
    if name not in NAMES:
        raise KernelUnavailable(f"kernels: expected one of {', '.join(NAMES)}, got {name!r}")
    return TorchKernels()

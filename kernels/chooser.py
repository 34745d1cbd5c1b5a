"""Which backend runs a model: by name, or the best one for a device and float type; and who computes noise words."""

import logging

import torch

from verdraft.kernels.base import Kernels, KernelUnavailable
from verdraft.kernels.build import NativeUnavailable, build_native
from verdraft.kernels.cpu import CpuKernels
from verdraft.kernels.native import NativeOps
from verdraft.kernels.noise import PhiloxBlocks, philox_blocks
from verdraft.kernels.torch_ref import TorchKernels

NAMES = ("auto", "torch", "cpu")

_log = logging.getLogger("verdraft.kernels")


def choose_kernels(name: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The backend called `name`; "auto" picks.

    Raises KernelUnavailable when an explicit name is unknown or cannot run on this device and type.
    """
    suits_cpu = device.type == "cpu" and dtype == torch.float32
    if name not in NAMES:
        raise KernelUnavailable(f"kernels: expected one of {', '.join(NAMES)}, got {name!r}")
    if name == "cpu" and not suits_cpu:
        raise KernelUnavailable(f"kernels: cpu runs float32 on the CPU only, not {dtype} on {device}")
    chosen: Kernels = CpuKernels() if name == "cpu" or (name == "auto" and suits_cpu) else TorchKernels()
    _log.info("kernels: %s for %s on %s (asked for %s)", chosen.name, dtype, device, name)
    return chosen


def choose_philox() -> PhiloxBlocks:
    """The quickest source of noise words here; all give the same words."""
    try:
        return NativeOps(build_native()).philox_blocks
    except NativeUnavailable as error:
        _log.warning("noise comes from numpy, the same but half a millisecond slower per sampled token: %s", error)
        return philox_blocks

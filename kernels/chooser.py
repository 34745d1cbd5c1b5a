"""Which backend runs a model: by name, or the best one for a device and float type; and who computes noise words."""

import logging

import torch

from verdraft.kernels.base import Kernels, KernelUnavailable
from verdraft.kernels.blocks import Quantization
from verdraft.kernels.build import NativeUnavailable, build_native
from verdraft.kernels.cpu import CpuKernels
from verdraft.kernels.native import NativeOps
from verdraft.kernels.noise import PhiloxBlocks, philox_blocks
from verdraft.kernels.torch_ref import TorchKernels

NAMES = ("auto", "torch", "cpu")

_log = logging.getLogger("verdraft.kernels")


def choose_kernels(name: str, device: torch.device, dtype: torch.dtype, quantization: Quantization = "none") -> Kernels:
    """The backend called `name`; "auto" picks. It packs weights in the bits of `quantization` (kernels/blocks.py).

    Raises KernelUnavailable when an explicit name is unknown or cannot run on this device and type, or when the
    backend cannot quantise as asked.
    """
    suits_cpu = device.type == "cpu" and dtype == torch.float32
    if name not in NAMES:
        raise KernelUnavailable(f"kernels: expected one of {', '.join(NAMES)}, got {name!r}")
    if name == "cpu" and not suits_cpu:
        raise KernelUnavailable(f"kernels: cpu runs float32 on the CPU only, not {dtype} on {device}")
    on_cpu = suits_cpu and name != "torch"
    if quantization in ("int8", "int4") and not on_cpu:
        raise KernelUnavailable(
            f"quantization: {quantization} needs the cpu kernels (float32 on the CPU), got {name}, {dtype} on {device}"
        )
    chosen: Kernels = CpuKernels(quantization=quantization) if on_cpu else TorchKernels()
    _log.info("kernels: %s for %s on %s (asked for %s)", chosen.name, dtype, device, name)
    return chosen


def choose_philox() -> PhiloxBlocks:
    """The quickest source of noise words here; all give the same words."""
    try:
        return NativeOps(build_native()).philox_blocks
    except NativeUnavailable as error:
        _log.warning("noise comes from numpy, the same but half a millisecond slower per sampled token: %s", error)
        return philox_blocks

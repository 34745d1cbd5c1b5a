"""Which backend runs a model: by name, or the best one for a device and float type; and who computes noise words."""

import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from verdraft.kernels import torch_sampling
from verdraft.kernels.base import Kernels, KernelUnavailable
from verdraft.kernels.blocks import Activations, Quantization
from verdraft.kernels.build import NativeUnavailable, build_native
from verdraft.kernels.cpu import CpuKernels
from verdraft.kernels.draws import Sampler
from verdraft.kernels.flash_libraries import LibraryMissing, find_flash_library
from verdraft.kernels.native import DraftCalls, NativeOps
from verdraft.kernels.noise import Contenders, PhiloxBlocks, philox_blocks
from verdraft.kernels.torch_ref import TorchKernels

PACKAGES = ("torch", "triton", "tokenspeed-fa3", "flash-attn", "numpy")  # what may compute, as pip calls it

_log = logging.getLogger("verdraft.kernels")


@dataclass(frozen=True, slots=True)
class Wish:
    """What a backend is asked to do. `deterministic`: no row may depend on what is computed beside it."""

    device: torch.device
    dtype: torch.dtype
    quantization: Quantization = "none"
    deterministic: bool = False
    activations: Activations = "float"

    def __str__(self) -> str:
        extras: list[str] = [self.quantization] if self.quantization in ("int8", "int4", "fp8") else []
        extras += [f"{self.activations} activations"] if self.activations != "float" else []
        extras += ["deterministic"] if self.deterministic else []
        return " ".join((f"{self.dtype} on {self.device}".removeprefix("torch."), *(f"({extra})" for extra in extras)))


@dataclass(frozen=True, slots=True)
class Backend:
    """`missing` says why a wish cannot be granted here (None: it can); `make` then grants it."""

    missing: Callable[[Wish], str | None]
    make: Callable[[Wish], Kernels]


def choose_kernels(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization = "none",
    deterministic: bool = False,
    activations: Activations = "float",
) -> Kernels:
    """The backend called `name`; "auto" takes the first of BACKENDS that can. It packs weights in the bits of
    `quantization` (kernels/blocks.py) and rounds what meets them to `activations`; `deterministic` demands one that is
    exact.

    Raises KernelUnavailable when an explicit name is unknown or cannot run here, or when no backend can.
    """
    wish = Wish(device, dtype, quantization, deterministic, activations)
    if name not in ("auto", *BACKENDS):
        raise KernelUnavailable(f"kernels: expected one of {', '.join(('auto', *BACKENDS))}, got {name!r}")
    reasons = survey(wish)
    if name == "auto":
        chosen = next((other for other, reason in reasons.items() if reason is None), None)
        if chosen is None:
            told = "; ".join(f"{other}: {reason}" for other, reason in reasons.items())
            raise KernelUnavailable(f"kernels: none can run {wish}: {told}")
    else:
        chosen = name
        if reason := reasons[name]:
            raise KernelUnavailable(f"kernels: {name} cannot run {wish}: {reason}")
    kernels = BACKENDS[chosen].make(wish)
    better = list(reasons)[: list(reasons).index(chosen)] if name == "auto" else []
    told = "".join(f"; not {other}: {reasons[other]}" for other in better)
    _log.info("kernels: %s for %s (asked for %s%s)", kernels.name, wish, name, told)
    return kernels


def survey(wish: Wish) -> Mapping[str, str | None]:
    """For every backend, the best first, why it cannot do as wished; None: it can."""
    return {name: backend.missing(wish) for name, backend in BACKENDS.items()}


def versions() -> Mapping[str, str | None]:
    """Of PACKAGES; None: not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _flash_missing(wish: Wish) -> str | None:
    if wish.device.type != "cuda":
        return "needs an NVIDIA GPU"
    if wish.dtype not in (torch.bfloat16, torch.float16):
        return "computes bfloat16 and float16 only"
    if wish.deterministic:
        return "its libraries round a row by what is computed beside it"
    try:
        find_flash_library(torch.cuda.get_device_capability(wish.device))
    except LibraryMissing as error:
        return str(error)
    return _triton_missing(wish)


def _make_flash(wish: Wish) -> Kernels:
    from verdraft.kernels.flash import FlashKernels

    return FlashKernels(find_flash_library(torch.cuda.get_device_capability(wish.device)), wish.quantization)


def _triton_missing(wish: Wish) -> str | None:
    if wish.device.type != "cuda":
        return "needs an NVIDIA GPU"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.get_device_capability(wish.device) < (8, 0):
        return "needs a GPU of compute capability 8 or more"
    if wish.activations != "float":
        return f"has no product for {wish.activations} activations"
    if wish.quantization == "fp8" and torch.cuda.get_device_capability(wish.device) < (8, 9):
        return "needs a GPU of compute capability 8.9 or more for the quantization fp8"
    return "has no product for the quantization int4" if wish.quantization == "int4" else None


def _make_triton(wish: Wish) -> Kernels:
    from verdraft.kernels.triton_kernels import TritonKernels

    return TritonKernels(wish.deterministic, wish.quantization)


def _cpu_missing(wish: Wish) -> str | None:
    if wish.device.type != "cpu" or wish.dtype != torch.float32:
        return "computes float32 on the CPU only"
    return "has no product for the quantization fp8" if wish.quantization == "fp8" else None


def _make_cpu(wish: Wish) -> Kernels:
    return CpuKernels(quantization=wish.quantization, activations=wish.activations)


def _torch_missing(wish: Wish) -> str | None:
    if wish.activations != "float":
        return f"the {wish.activations} activations need the cpu kernels (float32 on the CPU)"
    if wish.quantization == "fp8":
        return "the quantization fp8 needs the triton kernels (an NVIDIA GPU)"
    if wish.quantization in ("int8", "int4"):
        return f"the quantization {wish.quantization} needs the cpu kernels (float32 on the CPU) or, for int8, a GPU's"
    return "its rows depend on what is computed beside them" if wish.deterministic else None


def _make_torch(wish: Wish) -> Kernels:
    return TorchKernels()


BACKENDS: Mapping[str, Backend] = {
    "flash": Backend(_flash_missing, _make_flash),
    "cpu": Backend(_cpu_missing, _make_cpu),
    "triton": Backend(_triton_missing, _make_triton),
    "torch": Backend(_torch_missing, _make_torch),
}


def choose_sampler(device: torch.device) -> Sampler:
    """What finds the law's tokens where the logits are: our kernel where Triton compiles or interprets it, else torch;
    the tokens are the same."""
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1" and _version("triton")
    if not interpreted and _triton_missing(Wish(device, torch.float32)):
        return torch_sampling.law_tokens
    from verdraft.kernels import triton_sampling

    return triton_sampling.law_tokens


def choose_philox() -> PhiloxBlocks:
    """The quickest source of noise words here; all give the same words."""
    try:
        return NativeOps(build_native()).philox_blocks
    except NativeUnavailable as error:
        _log.warning("noise comes from numpy, the same but half a millisecond slower per sampled token: %s", error)
        return philox_blocks


def choose_contenders() -> Contenders | None:
    """The quick way to a token where only a temperature shapes the distribution, if there is one here."""
    try:
        return NativeOps(build_native()).contenders
    except NativeUnavailable:
        return None


@cache
def choose_draft_calls() -> DraftCalls | None:
    """The quick way to search a suffix index and to predict what a draft brings, if there is one here."""
    try:
        return DraftCalls(build_native())
    except NativeUnavailable:
        return None

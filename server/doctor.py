"""`verdraft doctor`: what is installed, which devices there are, and which kernels run on them or why not."""

import os
import platform
from collections.abc import Iterator

import psutil
import torch

import verdraft
from verdraft.kernels.build import NativeUnavailable, build_native
from verdraft.kernels.chooser import Wish, survey, versions

GIB = 1 << 30


def examine() -> Iterator[str]:
    """The lines of the report."""
    machine = f"{platform.system()} {platform.machine()}"
    yield f"verdraft {verdraft.__version__}, Python {platform.python_version()}, {machine}"
    yield "packages: " + ", ".join(f"{name} {version or '(not installed)'}" for name, version in versions().items())
    yield f"CPU operations: {_native()}"
    yield from _kernels(torch.device("cpu"), torch.float32, _cpu())
    if not torch.cuda.is_available():
        yield f"no GPU: {'torch finds none' if torch.version.cuda else 'this torch is built without CUDA'}"
    for index in range(torch.cuda.device_count()):
        yield from _kernels(torch.device("cuda", index), torch.bfloat16, _gpu(index))


def _native() -> str:
    try:
        return f"compiled, {build_native()}"
    except NativeUnavailable as error:
        return f"plain torch, exact but slower: {error}"


def _cpu() -> str:
    memory = psutil.virtual_memory()
    return f"{os.cpu_count()} cores, {memory.total / GIB:.1f} GiB of memory, {memory.available / GIB:.1f} free"


def _gpu(index: int) -> str:
    free, total = torch.cuda.mem_get_info(index)
    major, minor = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    return f"{name}, compute capability {major}.{minor}, {total / GIB:.1f} GiB of memory, {free / GIB:.1f} free"


def _kernels(device: torch.device, dtype: torch.dtype, about: str) -> Iterator[str]:
    yield f"{device}: {about}"
    for wish in (
        Wish(device, dtype),
        Wish(device, dtype, deterministic=True),
        Wish(device, dtype, "int8"),
        Wish(device, dtype, "int4"),
        Wish(device, dtype, "fp8"),
        Wish(device, dtype, activations="int8"),
    ):
        yield f"  kernels for {wish}"
        reasons = survey(wish)
        auto = next((name for name, reason in reasons.items() if reason is None), None)
        for name, reason in reasons.items():
            yield f"    {name:7} {reason or ('yes, what auto takes' if name == auto else 'yes')}"

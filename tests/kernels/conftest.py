"""The backends under test: torch, the portable operations, the C++ for this processor and for older ones, and Triton's
kernels through its interpreter, where Triton is installed."""

import importlib.util
import os
from functools import cache
from pathlib import Path

import pytest

from verdraft.kernels.base import Kernels
from verdraft.kernels.build import build_native
from verdraft.kernels.cpu import CpuKernels
from verdraft.kernels.native import NativeOps
from verdraft.kernels.portable import PortableOps
from verdraft.kernels.torch_ref import TorchKernels


def older_processors() -> list[str]:
    """The -march of older processors whose code runs here: x86-64 without AVX, and with AVX2 where that is older."""
    info = Path("/proc/cpuinfo")
    words = set(info.read_text().split()) if info.exists() else set()
    return [march for march, beyond in (("x86-64", "avx"), ("x86-64-v3", "avx512f")) if beyond in words]


NATIVE = ["native", *older_processors()]


@cache
def native_ops(processor: str) -> NativeOps:
    if processor == "native":
        return NativeOps(build_native())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", f"{os.environ.get('CXX', 'g++')} -march={processor}")
        return NativeOps(build_native())


def make_kernels(name: str) -> Kernels:
    if name == "torch":
        return TorchKernels()
    if name == "triton":
        if not importlib.util.find_spec("triton"):
            pytest.skip("triton is not installed")
        from verdraft.kernels.triton_kernels import TritonKernels

        return TritonKernels()
    return CpuKernels(PortableOps() if name == "portable" else native_ops(name))


@pytest.fixture(params=NATIVE)
def native(request: pytest.FixtureRequest) -> NativeOps:
    return native_ops(request.param)


@pytest.fixture(params=["portable", *NATIVE])
def exact(request: pytest.FixtureRequest) -> Kernels:
    return make_kernels(request.param)


@pytest.fixture(params=["torch", "triton", "portable", *NATIVE])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return make_kernels(request.param)

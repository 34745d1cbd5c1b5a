"""Checks that need a GPU; they import little beside torch, pytest and this project, as such machines may be bare.

With `--device cpu` the first case of every test runs on the CPU, in float32: that the tests themselves run.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from verdraft.kernels.base import Kernels
from verdraft.kernels.chooser import BACKENDS, Wish, choose_kernels, survey
from verdraft.kernels.cpu import CpuKernels
from verdraft.kernels.portable import PortableOps

FOLDER = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: one case of every test")


def on_gpu(config: pytest.Config) -> bool:
    chosen = config.getoption("--device", default="cuda")  # it is unknown where all tests are collected
    return bool(chosen == "cuda")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(FOLDER)]
    if not on_gpu(config):
        first = {item.nodeid.split("[")[0]: item for item in reversed(ours)}
        items[:] = reversed(first.values())
        return
    reason = None if torch.cuda.is_available() else "torch finds no GPU"
    if reason is None and os.environ.get("TRITON_INTERPRET") == "1":
        reason = "TRITON_INTERPRET=1 keeps kernels off the GPU"
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    return torch.device("cuda" if on_gpu(pytestconfig) else "cpu")


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    found: torch.dtype = request.param
    return found if device.type == "cuda" else torch.float32


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(params=[name for name in BACKENDS if name != "cpu"])
def fast(request: pytest.FixtureRequest, device: torch.device) -> Kernels:
    """Each backend that can run bfloat16 here."""
    name = request.param if device.type == "cuda" else "torch"
    if reason := survey(Wish(device, torch.bfloat16))[name]:
        pytest.skip(f"{name}: {reason}")
    return choose_kernels(name, device, torch.bfloat16)


@pytest.fixture
def exact(device: torch.device) -> Kernels:
    """The deterministic one; on a CPU one whose pages lie as on a GPU."""
    if device.type == "cpu":
        return CpuKernels(PortableOps())
    return choose_kernels("auto", device, torch.bfloat16, deterministic=True)


@pytest.fixture
def half(device: torch.device) -> torch.dtype:
    """What `exact` computes in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32

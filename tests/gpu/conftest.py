"""Checks that need a GPU; they import little beside torch, pytest and this project, as such machines may be bare."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from verdraft.kernels.base import Kernels
from verdraft.kernels.chooser import BACKENDS, Wish, choose_kernels, survey

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None if torch.cuda.is_available() else "torch finds no GPU"
    if reason is None and os.environ.get("TRITON_INTERPRET") == "1":
        reason = "TRITON_INTERPRET=1 keeps kernels off the GPU"
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(params=[name for name in BACKENDS if name != "cpu"])
def fast(request: pytest.FixtureRequest, device: torch.device) -> Kernels:
    """Each backend that can run bfloat16 here."""
    if reason := survey(Wish(device, torch.bfloat16))[request.param]:
        pytest.skip(f"{request.param}: {reason}")
    return choose_kernels(request.param, device, torch.bfloat16)


@pytest.fixture
def exact(device: torch.device) -> Kernels:
    """The deterministic one."""
    return choose_kernels("auto", device, torch.bfloat16, deterministic=True)

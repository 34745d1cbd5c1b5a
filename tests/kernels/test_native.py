"""Building the C++ operations, and which backend is chosen."""

import logging
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from verdraft.kernels.base import KernelUnavailable
from verdraft.kernels.build import NativeUnavailable, build_native
from verdraft.kernels.chooser import BACKENDS, choose_kernels, choose_philox
from verdraft.kernels.cpu import CpuKernels
from verdraft.kernels.native import NativeOps
from verdraft.kernels.noise import philox_blocks

CPU = torch.device("cpu")


def test_builds_that_race_leave_one_library_which_is_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", f"{os.environ.get('CXX', 'g++')} -O0")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: build_native(), range(2))
    assert first == second
    assert list((tmp_path / "verdraft" / "native").iterdir()) == [first]
    assert torch.equal(NativeOps(first).silu_mul(torch.zeros(1, 16)), torch.zeros(1, 8))
    before = first.stat()
    assert build_native() == first
    assert first.stat().st_mtime_ns == before.st_mtime_ns


def test_without_a_compiler_the_cpu_backend_says_so_once_and_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING, logger="verdraft.kernels"):
        kernels = CpuKernels()
    assert [record.name for record in caplog.records] == ["verdraft.kernels"]
    assert "no-such-compiler" in caplog.text
    assert torch.equal(kernels.silu_mul(torch.zeros(2, 16)), torch.zeros(2, 8))


def test_without_a_compiler_noise_words_come_from_numpy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_philox() is not philox_blocks
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING, logger="verdraft.kernels"):
        assert choose_philox() is philox_blocks
    assert "no-such-compiler" in caplog.text


def test_a_compiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NativeUnavailable, match="false could not build"):
        build_native(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_library_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "ops.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(NativeUnavailable, match="does not load"):
        NativeOps(broken)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("auto", torch.float32, "cpu"),
        ("auto", torch.bfloat16, "torch"),
        ("cpu", torch.float32, "cpu"),
        ("torch", torch.float32, "torch"),
        ("torch", torch.float16, "torch"),
    ],
)
def test_chooser(name: str, dtype: torch.dtype, expected: str) -> None:
    assert choose_kernels(name, CPU, dtype).name == expected


def test_auto_off_the_cpu_is_torch() -> None:
    assert choose_kernels("auto", torch.device("meta"), torch.float32).name == "torch"


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("cpu", torch.bfloat16, "computes float32 on the CPU only"),
        ("mkl", torch.float32, "expected one of auto, flash, cpu, triton, torch"),
    ],
)
def test_an_explicit_name_that_cannot_run_is_an_error(name: str, dtype: torch.dtype, reason: str) -> None:
    with pytest.raises(KernelUnavailable, match=reason):
        choose_kernels(name, CPU, dtype)


@pytest.mark.parametrize("name", ["flash", "triton"])
def test_gpu_kernels_are_refused_on_a_cpu(name: str) -> None:
    with pytest.raises(KernelUnavailable, match=f"{name} cannot run bfloat16 on cpu: needs an NVIDIA GPU"):
        choose_kernels(name, CPU, torch.bfloat16)


def test_deterministic_means_exact_or_nothing() -> None:
    assert choose_kernels("auto", CPU, torch.float32, deterministic=True).exact
    with pytest.raises(KernelUnavailable, match=r"torch cannot run float32 on cpu \(deterministic\): its rows depend"):
        choose_kernels("torch", CPU, torch.float32, deterministic=True)


def test_a_wish_that_nothing_grants_gets_every_reason() -> None:
    with pytest.raises(KernelUnavailable) as caught:
        choose_kernels("auto", CPU, torch.bfloat16, deterministic=True)
    assert str(caught.value).startswith("kernels: none can run bfloat16 on cpu (deterministic): flash: needs")
    assert all(name in str(caught.value) for name in BACKENDS)


def test_the_log_says_which_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="verdraft.kernels"):
        choose_kernels("auto", CPU, torch.float32)
    assert "kernels: cpu for float32 on cpu (asked for auto; not flash: needs an NVIDIA GPU)" in caplog.text


@pytest.mark.parametrize("head_dim", [12, 264, 0])
def test_head_dims_beyond_the_native_kernel_are_refused(head_dim: int) -> None:
    with pytest.raises(KernelUnavailable, match="multiple of 8 up to 256"):
        choose_kernels("cpu", CPU, torch.float32).pool(1, 1, 16, 1, head_dim, torch.float32, CPU)


def test_no_step_is_the_first_to_write_a_page_of_the_pool() -> None:
    pool = choose_kernels("cpu", CPU, torch.float32).pool(4, 512, 16, 4, 64, torch.float32, CPU)
    arrays = [tensor.numpy() for layer_kv in pool for tensor in (layer_kv.k, layer_kv.v)]
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for array in arrays:
        array.fill(0.0)
    # 64 MiB never written would be 32 faults of 2 MiB pages at least.
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before <= 8

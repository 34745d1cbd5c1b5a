"""`verdraft doctor` on whatever machine this is."""

import pytest
import torch

from verdraft.kernels.chooser import BACKENDS, PACKAGES
from verdraft.server.cli import main


def report(capsys: pytest.CaptureFixture[str]) -> str:
    main(["doctor"])
    return capsys.readouterr().out


def test_every_package_and_backend_is_there_or_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    text = report(capsys)
    for name in (*PACKAGES, *BACKENDS):
        assert name in text
    assert f"torch {torch.__version__}" in text
    assert "cpu     yes, what auto takes" in text
    assert "flash   needs an NVIDIA GPU" in text
    assert "torch   its rows depend on what is computed beside them" in text
    assert "cpu     has no product for the quantization fp8" in text
    assert "CPU operations: compiled" in text
    for asked in ("(deterministic)", "(int8)", "(int4)", "(fp8)", "(int8 activations)"):
        assert f"kernels for float32 on cpu {asked}" in text


def test_without_a_gpu_or_a_compiler_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("CXX", "no-such-compiler")
    text = report(capsys)
    assert "no GPU: " in text
    assert "plain torch, exact but slower: no C++ compiler 'no-such-compiler'" in text

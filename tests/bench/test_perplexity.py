"""Perplexity through the engine: what exact blocks leave alone, what others change, and the command's table."""

import math
import random
import sys
from pathlib import Path

import pytest

from verdraft.bench.perplexity import main, read_tokens, score


def windows(vocab: int) -> list[list[int]]:
    rnd = random.Random(0)
    return [[rnd.randrange(vocab) for _ in range(length)] for length in (50, 50, 17)]


def test_every_token_but_a_windows_first_is_scored(tiny_llama_path: Path) -> None:
    scores = score(tiny_llama_path, "none", windows(320))
    assert len(scores.logprobs) == 49 + 49 + 16
    assert scores.perplexity == pytest.approx(math.exp(-sum(scores.logprobs) / len(scores.logprobs)))


def test_only_bits_that_were_asked_for_change_a_model_that_no_blocks_made(tiny_llama_path: Path) -> None:
    plain = score(tiny_llama_path, "none", windows(320)).logprobs
    assert score(tiny_llama_path, "auto", windows(320)).logprobs == plain
    errors = []
    for quantization in ("int8", "fp8", "int4"):
        found = score(tiny_llama_path, quantization, windows(320)).logprobs
        errors.append(max(abs(a - b) for a, b in zip(found, plain, strict=True)))
    assert 0 < errors[0] < errors[1] < errors[2]


@pytest.mark.demo
def test_the_demo_model_keeps_its_bits_in_the_blocks_that_it_came_from(demo_path: Path) -> None:
    """So that `auto` may be the default. "int4" reads blocks for any number of rows, and here they are exact."""
    plain = score(demo_path, "none", windows(2000)).logprobs
    for quantization in ("auto", "int4"):
        assert score(demo_path, quantization, windows(2000)).logprobs == plain


@pytest.mark.demo
def test_rounded_inputs_change_the_demo_model_a_little(demo_path: Path) -> None:
    plain = score(demo_path, "auto", windows(2000))
    rounded = score(demo_path, "auto", windows(2000), "int8")
    assert rounded.logprobs != plain.logprobs
    assert rounded.perplexity == pytest.approx(plain.perplexity, rel=0.05)


@pytest.mark.demo
def test_the_table(
    demo_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The sea is blue, and the sky is blue too. " * 20)
    assert len(read_tokens(demo_path, text, 40)) == 40
    command = ["perplexity", "--data", str(text), "--tokens", "40", "--window", "16", "--quantization", "int4"]
    monkeypatch.setattr(sys, "argv", command)
    main()
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert (row[0], row[1], row[3]) == ("int4", "float", "0.000000")
    assert 1 < float(row[2]) < 1000

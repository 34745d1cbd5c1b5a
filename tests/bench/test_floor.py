"""What a pass is compared with: the bytes that it cannot but read."""

from pathlib import Path

import pytest
import torch

from verdraft.bench.floor import ROWS, bytes_read, print_floors
from verdraft.kernels.blocks import Quantization
from verdraft.kernels.chooser import choose_kernels
from verdraft.model.load import load_model
from verdraft.model.transformer import Transformer

CPU = torch.device("cpu")


def load(path: Path, quantization: Quantization) -> Transformer:
    return load_model(path, choose_kernels("cpu", CPU, torch.float32, quantization), torch.float32, CPU)


def test_a_context_adds_its_keys_and_values(tiny_llama_path: Path) -> None:
    model = load(tiny_llama_path, "none")
    weights = bytes_read(model, 0)
    assert weights >= 4 * model.config.hidden_size * model.config.vocab_size
    assert bytes_read(model, 10) == weights + 10 * model.kv_bytes_per_token


def test_blocks_are_fewer_bytes(tiny_llama_path: Path) -> None:
    sizes = [bytes_read(load(tiny_llama_path, bits), 0) for bits in ("none", "int8", "int4")]
    assert sizes[0] > sizes[1] > sizes[2]


def test_a_line_for_every_number_of_rows(tiny_llama_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_floors(tiny_llama_path, 64)
    lines = capsys.readouterr().out.splitlines()
    none, auto, rounded = ["none", *map(str, ROWS)], ["auto", *map(str, ROWS)], ["activations:"]  # has no blocks
    assert [line.split()[0] for line in lines] == [*none, *auto, *rounded]
    assert all("1.00 (1.00 to 1.00)" in lines[i] for i in (1, len(ROWS) + 2))

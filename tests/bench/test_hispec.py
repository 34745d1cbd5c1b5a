"""What drafting with exits brings, measured: runs, counts, agreement, memory, the synthetic model and the plot."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from verdraft.bench.exit_runs import Bench, Setting
from verdraft.bench.hispec import modes
from verdraft.bench.memory import Span, tensor_bytes
from verdraft.bench.plot import line_charts
from verdraft.bench.synthetic import Shape, write_model
from verdraft.kernels.chooser import choose_kernels
from verdraft.model.exit_head import own_exits
from verdraft.model.load import load_model
from verdraft.model.transformer import Transformer

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]


def load(path: Path) -> Transformer:
    cpu = torch.device("cpu")
    return load_model(path, choose_kernels("cpu", cpu, torch.float32), torch.float32, cpu)


@pytest.fixture
def bench(deep_agreeing_path: Path) -> Bench:
    model = load(deep_agreeing_path)
    return Bench(model, own_exits(model, (1, 2)), max_tokens=20)


def test_all_settings_say_the_same_and_windows_save_passes(bench: Bench) -> None:
    found = bench.turns(modes(), PROMPTS, 2)
    assert {len(output) for result in found.values() for output in result.outputs} == {20}
    off, early, both = found["off"], found["early_exit"], found["hispec"]
    assert off.tokens == off.target_passes == 3 * 19
    assert early.target_passes < off.target_passes
    assert early.passes[0] > early.passes[1] == early.passes[2]  # nobody checks in between
    assert both.passes[0] > both.passes[1] > both.passes[2]
    assert 0 < early.accepted <= early.drafted


def test_agreement_counts_first_choices_of_both_exits(bench: Bench) -> None:
    answer = bench.run(Setting("off", "off"), PROMPTS[:1]).outputs[0]
    draft, check, num = bench.agreement(PROMPTS[0], answer)
    assert num == 20
    assert 0 < draft <= check <= num
    same = Bench(bench.model, own_exits(bench.model, (2, 3)), 20)
    assert same.agreement(PROMPTS[0], answer)[0] == check


def test_the_synthetic_model_agrees_as_its_later_layers_add_little(tmp_path: Path) -> None:
    shape = Shape(4, hidden=32, inner=48, heads=2, kv_heads=1, vocabulary=64)
    rates = []
    for scale in (0.0, 1.0):
        folder = tmp_path / str(scale)
        folder.mkdir()
        model = load(write_model(folder, shape, scale))
        bench = Bench(model, own_exits(model, (1, 2)), 20)
        rates.append(bench.run(Setting("early_exit", "early_exit"), PROMPTS).acceptance)
    assert rates[0] == 1.0
    assert rates[1] < 0.6


def test_bytes_of_tensors_are_counted_once(bench: Bench) -> None:
    weight = torch.zeros(3, 4)
    assert tensor_bytes({"a": [weight, weight[1]], "b": (lambda: weight)}, set()) == 48
    seen: set[Span] = set()
    assert tensor_bytes(bench.model, seen) > 4 * 320 * 64
    assert tensor_bytes(bench.exits, seen) == 0  # the model's own norm and head


def test_tensors_of_an_arena_count_alone() -> None:
    """Three small heads once were 67 MB, because all weights of one size live in a few large pieces of memory."""
    arena = torch.zeros(1000, dtype=torch.uint8)
    parts = [arena[100:150], arena[140:200], arena[500:510].view(2, 5)]
    assert tensor_bytes(parts, set()) == 110


def test_the_plot_is_an_svg_with_every_line(tmp_path: Path) -> None:
    line_charts(tmp_path / "a.svg", {"N_d": {"speed": [(2, 1.0), (4, 1.5)], "kept": [(2, 0.5)]}}, "ratio")
    names = [element.tag.rsplit("}")[-1] for element in ET.parse(tmp_path / "a.svg").iter()]
    assert names.count("polyline") == 3

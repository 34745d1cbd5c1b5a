"""Exit heads: what loads, what is refused, and what a head computes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from verdraft.kernels.base import Kernels
from verdraft.kernels.torch_ref import TorchKernels
from verdraft.model.errors import ModelError
from verdraft.model.exit_file import AdapterWeights, TrainedHead, head_rows, load_exits, save_exits, shipped_exits
from verdraft.model.exit_head import Exits, own_exits
from verdraft.model.load import load_model
from verdraft.model.transformer import Transformer

CPU = torch.device("cpu")
TinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def deep_path(tiny_model: TinyModel) -> Path:
    return tiny_model("Llama", num_hidden_layers=4)


@pytest.fixture
def deep(deep_path: Path, kernels: Kernels) -> Transformer:
    return load_model(deep_path, kernels, torch.float32, CPU)


def test_no_exits_leave_one_segment() -> None:
    assert not Exits()
    assert Exits().bounds(30) == (0, 30)


def test_own_exits_are_the_final_norm_and_the_whole_head(deep: Transformer) -> None:
    exits = own_exits(deep, (1, 3))
    hidden = torch.randn(5, deep.config.hidden_size)
    assert exits.bounds(4) == (0, 1, 3, 4)
    assert exits.check.token_ids.tolist() == list(range(deep.config.vocab_size))
    with torch.inference_mode():
        assert torch.equal(exits.draft.logits(hidden), deep.logits(hidden))


@pytest.mark.parametrize("layers", [(0, 2), (2, 2), (3, 1), (1, 4), (-1, 2)])
def test_exits_lie_inside_the_model_in_order(deep: Transformer, layers: tuple[int, int]) -> None:
    with pytest.raises(ModelError, match="two layers in ascending order from 1 to 3"):
        own_exits(deep, layers)


def trained(layer: int, hidden: int = 64, inner: int = 16, ids: tuple[int, ...] = (3, 5, 8, 100)) -> TrainedHead:
    draw = torch.Generator().manual_seed(layer)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) * 0.2

    weights = AdapterWeights(some(hidden) + 1, some(2 * inner + hidden, hidden), some(hidden, inner), some(hidden) + 1)
    return TrainedHead(layer, np.array(ids, np.int64), weights)


@pytest.fixture
def saved(deep_path: Path, tmp_path: Path) -> Path:
    save_exits(tmp_path / "heads", deep_path, (trained(1), trained(3)), {"seed": 0})
    return tmp_path / "heads"


def test_a_trained_head_is_norm_adapter_norm_and_the_targets_rows(
    deep: Transformer, deep_path: Path, saved: Path
) -> None:
    exits = load_exits(saved, deep, deep_path)
    assert exits.bounds(4) == (0, 1, 3, 4)
    hidden = torch.randn(6, 64)
    with torch.inference_mode():
        logits = exits.check.logits(hidden).numpy()
        rows = deep.kernels.linear(torch.eye(64), deep.head).T[torch.tensor([3, 5, 8, 100])]
    w, eps = trained(3).weights, deep.config.norm_eps
    wide = F.linear(F.rms_norm(hidden, (64,), w.norm, eps), w.wide)
    inner = F.silu(wide[:, :16]) * wide[:, 16:32]
    expected = F.linear(F.rms_norm(F.linear(inner, w.down) + wide[:, 32:], (64,), w.out_norm, eps), rows)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected.numpy(), atol=0.15, rtol=0.02)  # the CPU reads them in 8 bits
    assert np.corrcoef(logits.ravel(), expected.numpy().ravel())[0, 1] > 0.9995


def test_heads_of_one_vocabulary_share_a_projection(deep: Transformer, deep_path: Path, saved: Path) -> None:
    exits = load_exits(saved, deep, deep_path)
    assert exits.draft.projection is exits.check.projection


def test_an_untied_head_gives_its_own_rows(tiny_model: TinyModel, kernels: Kernels, tmp_path: Path) -> None:
    for tied in (False, True):
        path = tiny_model("Llama", num_hidden_layers=4, tie_word_embeddings=tied)
        model = load_model(path, kernels, torch.float32, CPU)
        with torch.inference_mode():
            whole = model.kernels.linear(torch.eye(64), model.head).T
            torch.testing.assert_close(head_rows(model, path, np.array([2, 7])), whole[[2, 7]])


def test_heads_of_other_weights_are_refused(tiny_model: TinyModel, kernels: Kernels, saved: Path) -> None:
    path = tiny_model("Llama", num_hidden_layers=4, rms_norm_eps=1e-3)
    other = load_model(path, kernels, torch.float32, CPU)
    change_one_weight(path)
    with pytest.raises(ModelError, match="trained for other weights"):
        load_exits(saved, other, path)


def change_one_weight(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][0, 5] += 1
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def test_shipped_heads_are_for_exactly_one_model(
    tiny_model: TinyModel, deep: Transformer, deep_path: Path, saved: Path
) -> None:
    assert shipped_exits(deep, deep_path, saved.parent).bounds(4) == (0, 1, 3, 4)
    assert not shipped_exits(deep, tiny_model("Qwen3", num_hidden_layers=4), saved.parent)
    assert not shipped_exits(deep, deep_path)


Damage = Callable[[Path], object]


def edit(**changes: object) -> Damage:
    def damage(folder: Path) -> None:
        about = json.loads((folder / "exits.json").read_text())
        (folder / "exits.json").write_text(json.dumps({**about, **changes}))

    return damage


def cut_short(folder: Path) -> None:
    file = folder / "exits.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def swap_ids(folder: Path) -> None:
    tensors = load_file(folder / "exits.safetensors")
    tensors["check.token_ids"] = tensors["check.token_ids"].flip(0).contiguous()
    save_file(tensors, folder / "exits.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "exits.json").unlink(), "cannot read"),
        (lambda folder: (folder / "exits.json").write_text("{"), "not valid JSON"),
        (edit(format=2), "expected exit heads of format 1"),
        (edit(check={"layer": 3}), "check must give layer, vocabulary and inner as positive integers"),
        (edit(check={"layer": 4, "vocabulary": 4, "inner": 16}), "two layers in ascending order from 1 to 3, got 1,4"),
        (edit(draft={"layer": 1, "vocabulary": 4, "inner": 8}), r"'draft\.wide' has the shape \(96, 64\)"),
        (edit(draft={"layer": 1, "vocabulary": 5, "inner": 16}), r"'draft\.token_ids' has the shape \(4,\), expected"),
        (lambda folder: (folder / "exits.safetensors").unlink(), "missing or damaged"),
        (cut_short, "missing or damaged"),
        (swap_ids, r"check\.token_ids must ascend below 320"),
    ],
)
def test_bad_files_are_named(deep: Transformer, deep_path: Path, saved: Path, damage: Damage, message: str) -> None:
    damage(saved)
    with pytest.raises(ModelError, match=message):
        load_exits(saved, deep, deep_path)


def test_a_layerskip_checkpoint_exits_as_in_transformers(tiny_model: TinyModel, runner: Callable[[Path], Any]) -> None:
    """The published format is a plain Llama folder; its early exit is the final norm and the head behind any layer."""
    path = tiny_model("Llama", num_hidden_layers=4, tie_word_embeddings=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    one, tokens = runner(path), [1, 7, 300, 42, 9]
    exits = own_exits(one.model, (1, 3))
    batch = one.batch(len(tokens))
    with torch.inference_mode():
        streams = theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        hidden, done = one.model.embed(torch.tensor(tokens), batch.positions), 0
        for head in exits.heads:
            hidden, done = one.model.forward(hidden, batch, one.pool, done, head.layer), head.layer
            expected = theirs.lm_head(theirs.model.norm(streams[head.layer]))[0]
            torch.testing.assert_close(head.logits(hidden), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.demo
def test_heads_for_the_demo_model_ship(demo_path: Path) -> None:
    model = load_model(demo_path, TorchKernels(), torch.float32, CPU)
    exits = shipped_exits(model, demo_path)
    assert [head.layer for head in exits.heads] == [4, 12]
    with torch.inference_mode():
        assert exits.draft.logits(torch.randn(2, model.config.hidden_size)).isfinite().all()

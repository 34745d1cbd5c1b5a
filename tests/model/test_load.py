"""Weights on disk: shards, float types, and every way in which they can be damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from verdraft.kernels.chooser import choose_kernels
from verdraft.model.errors import ModelError
from verdraft.model.load import load_model
from verdraft.model.transformer import Transformer

CPU = torch.device("cpu")
TOKENS = torch.arange(3, 20)


def load(path: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    return load_model(path, choose_kernels("torch", CPU, dtype), dtype, CPU)


@pytest.fixture
def copy(tiny_llama_path: Path, tmp_path: Path) -> Path:
    """A tiny Llama that a test may damage."""
    return shutil.copytree(tiny_llama_path, tmp_path / "copy")


def change(folder: Path, changes: dict[str, Tensor], without: str = "") -> None:
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    tensors.pop(without, None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_what_the_engine_asks_of_a_model(tiny_llama_path: Path) -> None:
    model = load(tiny_llama_path)
    assert model.kv_bytes_per_token == 2 * 2 * 2 * 32 * 4  # K and V, layers, KV heads, head_dim, float32
    assert (model.dtype, model.device) == (torch.float32, CPU)
    assert len(model.new_pool(4, 16)) == 2
    assert model.config.eos_token_ids == {2}


def test_shards_load_as_one_file(tiny_model: Callable[..., Path], tiny_llama_path: Path) -> None:
    sharded = tiny_model("Llama", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    with torch.inference_mode():
        hidden = [load(path).embed(TOKENS, TOKENS) for path in (sharded, tiny_llama_path)]
        logits = [load(path).logits(hidden[0]) for path in (sharded, tiny_llama_path)]
    assert torch.equal(*hidden)
    assert torch.equal(*logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float_types(tiny_llama_path: Path, dtype: torch.dtype) -> None:
    """16-bit activations, float32 logits."""
    model = load(tiny_llama_path, dtype)
    with torch.inference_mode():
        hidden = model.embed(TOKENS, TOKENS)
        logits = model.logits(hidden)
        expected = load(tiny_llama_path).logits(hidden.float())
    assert (hidden.dtype, logits.dtype) == (dtype, torch.float32)
    assert (logits - expected).abs().max() < 0.05 * expected.std()


def test_a_sixteen_bit_checkpoint_runs_in_float32(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    change(copy, {name: tensor.bfloat16() for name, tensor in tensors.items()})
    assert load(copy).dtype == torch.float32


def test_a_missing_tensor_is_named(copy: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change(copy, {}, without=name)
    with pytest.raises(ModelError, match=rf"the tensor '{name}' is missing from .*copy"):
        load(copy)


def test_a_wrong_shape_is_named(copy: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    change(copy, {name: torch.zeros(63, 64)})
    with pytest.raises(
        ModelError, match=rf"safetensors: the tensor '{name}' has the shape \(63, 64\), expected \(64, 64\)"
    ):
        load(copy)


def test_integer_weights_are_refused(copy: Path) -> None:
    change(copy, {"model.norm.weight": torch.zeros(64, dtype=torch.int8)})
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' holds torch\.int8, expected floats"):
        load(copy)


@pytest.mark.parametrize("keep", [0, 4, 200, 50_000])
def test_a_file_cut_short_is_named(copy: Path, keep: int) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut short"):
        load(copy)


def test_a_missing_file_is_named(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        load(copy)


def test_a_missing_shard_is_named(tiny_model: Callable[..., Path]) -> None:
    sharded = tiny_model("Llama", max_shard_size="100KB")
    max(sharded.glob("*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"model-\d+-of-\d+\.safetensors is missing"):
        load(sharded)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "../model.safetensors", "/etc/x.safetensors", "", 3, None])
def test_an_index_names_safetensors_of_its_folder_alone(copy: Path, name: Any) -> None:
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ModelError, match=r"index\.json must name \.safetensors files of its folder"):
        load(copy)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(copy: Path, text: str) -> None:
    (copy / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index\.json is not an index"):
        load(copy)

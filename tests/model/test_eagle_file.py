"""EAGLE3 folders: the published formats, our own, and what is refused."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from verdraft.kernels.torch_ref import TorchKernels
from verdraft.model.eagle import EagleConfig, EagleHead, assemble_eagle
from verdraft.model.eagle_file import load_eagle, save_eagle, shipped_eagle
from verdraft.model.errors import ModelError
from verdraft.model.load import load_model
from verdraft.model.transformer import Transformer
from verdraft.scheduler.batches import ragged_batch

CPU = torch.device("cpu")
VOCAB = 320
IDS = np.array([3, 5, 8, 40, 41, 100, 319])
D2T = torch.tensor([3, 4, 6, 37, 37, 95, 313])  # id - row

EagleTensors = Callable[[EagleConfig, int], dict[str, Tensor]]
TinyModel = Callable[..., Path]

LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}
SAFEAILAB = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(IDS)}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "somebody/target"}},
    "transformer_layer_config": LAYER,
    "draft_vocab_size": len(IDS),
    "target_hidden_size": None,
}
AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def deep(deep_llama_path: Path) -> Transformer:
    return load_model(deep_llama_path, TorchKernels(), torch.float32, CPU)


@pytest.fixture(scope="module")
def config(tiny_eagle: EagleConfig) -> EagleConfig:
    return replace(tiny_eagle, aux_layers=(1, 2, 3))


@pytest.fixture
def tensors(config: EagleConfig, eagle_tensors: EagleTensors) -> dict[str, Tensor]:
    return {**eagle_tensors(config, len(IDS)), "d2t": D2T}


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


@torch.inference_mode()
def outcome(head: EagleHead) -> tuple[Tensor, Tensor]:
    """What a head makes of some rows."""
    torch.manual_seed(3)
    aux, tokens = torch.randn(5, 3 * head.config.target_hidden_size), torch.randint(0, VOCAB, (5,))
    batch = ragged_batch(np.array([5]), np.array([0]), np.array([[0]]), 16, CPU)
    hidden = head.forward(head.fuse(aux), tokens, batch, head.new_pool(1, 16))
    return hidden, head.logits(hidden)


def assert_same(loaded: EagleHead, expected: EagleHead) -> None:
    assert loaded.config == expected.config
    assert loaded.token_ids.tolist() == expected.token_ids.tolist()
    for mine, theirs in zip(outcome(loaded), outcome(expected), strict=True):
        assert torch.equal(mine, theirs)


def speculators_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def test_safeailab_and_specforge(
    config: EagleConfig, tensors: dict[str, Tensor], deep: Transformer, deep_llama_path: Path, tmp_path: Path
) -> None:
    """`eagle_config` numbers layers by their outputs: behind 0, 1, 2 is what enters 1, 2, 3."""
    about = {**SAFEAILAB, "eagle_config": {AUX: [0, 1, 2], "use_aux_hidden_state": True}}
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    folder = write(tmp_path / "head", about, {**tensors, "t2d": t2d})
    assert_same(load_eagle(folder, deep, deep_llama_path), assemble_eagle(config, tensors, IDS, deep))


def test_speculators(
    config: EagleConfig, tensors: dict[str, Tensor], deep: Transformer, deep_llama_path: Path, tmp_path: Path
) -> None:
    """Numbers layers by their inputs."""
    about = {**SPECULATORS, AUX: [1, 2, 3], "norm_before_residual": True}
    folder = write(tmp_path / "head", about, speculators_names(tensors))
    expected = assemble_eagle(replace(config, norm_before_residual=True), tensors, IDS, deep)
    assert_same(load_eagle(folder, deep, deep_llama_path), expected)


VARIANTS: list[dict[str, Any]] = [
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "norm_before_residual": True},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("where", ["top", "eagle_config", "speculators"])
def test_variants_of_norms(
    config: EagleConfig,
    eagle_tensors: EagleTensors,
    deep: Transformer,
    deep_llama_path: Path,
    tmp_path: Path,
    options: dict[str, Any],
    where: str,
) -> None:
    config = replace(config, **options)
    tensors = {**eagle_tensors(config, len(IDS)), "d2t": D2T}
    inner = {AUX: [0, 1, 2], **(options if where == "eagle_config" else {})}
    about = {**SAFEAILAB, "eagle_config": inner, **(options if where == "top" else {})}
    if where == "speculators":
        about, tensors = {**SPECULATORS, AUX: [1, 2, 3], **options}, speculators_names(tensors)
    folder = write(tmp_path / "head", about, tensors)
    expected = assemble_eagle(config, eagle_tensors(config, len(IDS)), IDS, deep)
    assert_same(load_eagle(folder, deep, deep_llama_path), expected)


def test_biases_and_the_head_norms_of_qwen3(
    config: EagleConfig, eagle_tensors: EagleTensors, deep: Transformer, deep_llama_path: Path, tmp_path: Path
) -> None:
    config = replace(config, qkv_bias=True, output_bias=True, mlp_bias=True, head_norms=True)
    tensors = eagle_tensors(config, len(IDS))
    layer = {**LAYER, "model_type": "qwen3", "attention_bias": True, "mlp_bias": True}
    about = {**SPECULATORS, "transformer_layer_config": layer, AUX: [1, 2, 3]}
    folder = write(tmp_path / "head", about, {**speculators_names(tensors), "d2t": D2T})
    assert_same(load_eagle(folder, deep, deep_llama_path), assemble_eagle(config, tensors, IDS, deep))


def test_a_narrower_head_has_its_own_embedding(
    config: EagleConfig, eagle_tensors: EagleTensors, deep: Transformer, deep_llama_path: Path, tmp_path: Path
) -> None:
    config = replace(config, hidden_size=32)
    tensors = {**eagle_tensors(config, len(IDS)), "d2t": D2T, "embed_tokens.weight": torch.randn(VOCAB, 32)}
    about = {**SAFEAILAB, "hidden_size": 32, "target_hidden_size": 64, "eagle_config": {AUX: [0, 1, 2]}}
    folder = write(tmp_path / "head", about, tensors)
    assert_same(load_eagle(folder, deep, deep_llama_path), assemble_eagle(config, tensors, IDS, deep))
    write(folder, about, {name: tensor for name, tensor in tensors.items() if "embed" not in name})
    with pytest.raises(ModelError, match=r"'embed_tokens\.weight' is missing .* 64, not 32"):
        load_eagle(folder, deep, deep_llama_path)


def test_without_d2t_every_token_can_be_drafted(
    config: EagleConfig, eagle_tensors: EagleTensors, deep: Transformer, deep_llama_path: Path, tmp_path: Path
) -> None:
    tensors = eagle_tensors(config, VOCAB)
    about = {**SAFEAILAB, "draft_vocab_size": None, "eagle_config": {AUX: [0, 1, 2]}}
    head = load_eagle(write(tmp_path / "head", about, tensors), deep, deep_llama_path)
    assert_same(head, assemble_eagle(config, tensors, np.arange(VOCAB), deep))


def test_rows_of_any_order_are_sorted(
    config: EagleConfig, tensors: dict[str, Tensor], deep: Transformer, deep_llama_path: Path, tmp_path: Path
) -> None:
    turned = {
        **tensors,
        "lm_head.weight": tensors["lm_head.weight"].flip(0).contiguous(),
        "d2t": torch.from_numpy(IDS[::-1] - np.arange(len(IDS))),
    }
    folder = write(tmp_path / "head", {**SAFEAILAB, "eagle_config": {AUX: [0, 1, 2]}}, turned)
    assert_same(load_eagle(folder, deep, deep_llama_path), assemble_eagle(config, tensors, IDS, deep))


def test_layers_are_the_papers_unless_said(tiny_model: TinyModel, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    path = tiny_model("Llama", num_hidden_layers=8)
    target = load_model(path, TorchKernels(), torch.float32, CPU)
    for about, named in ((SAFEAILAB, tensors), (SPECULATORS, speculators_names(tensors))):
        assert load_eagle(write(tmp_path / "head", about, named), target, path).config.aux_layers == (2, 4, 5)


@pytest.fixture
def saved(config: EagleConfig, tensors: dict[str, Tensor], deep_llama_path: Path, tmp_path: Path) -> Path:
    own = {name: tensor for name, tensor in tensors.items() if name not in ("lm_head.weight", "d2t")}
    folder = tmp_path / "heads" / "tiny" / "eagle"
    save_eagle(folder, deep_llama_path, config, own, IDS, VOCAB, {"seed": 0})
    return folder


def test_our_own_leave_the_projection_to_the_target(
    config: EagleConfig, tensors: dict[str, Tensor], deep: Transformer, deep_llama_path: Path, saved: Path
) -> None:
    with torch.inference_mode():
        rows = deep.kernels.linear(torch.eye(64), deep.head).T[torch.from_numpy(IDS)]
    halves = {name: tensor.half().float() for name, tensor in tensors.items()} | {"lm_head.weight": rows}
    assert "lm_head.weight" not in load_file(saved / "model.safetensors")
    assert_same(load_eagle(saved, deep, deep_llama_path), assemble_eagle(config, halves, IDS, deep))


@pytest.mark.parametrize("layers", [(0, 1, 2), (0, 2, 3)])
def test_a_head_may_read_the_embedding(
    config: EagleConfig,
    tensors: dict[str, Tensor],
    deep: Transformer,
    deep_llama_path: Path,
    tmp_path: Path,
    layers: tuple[int, int, int],
) -> None:
    """That was once written as the output of layer -1, which no reader takes."""
    own = {name: tensor for name, tensor in tensors.items() if name not in ("lm_head.weight", "d2t")}
    save_eagle(tmp_path, deep_llama_path, replace(config, aux_layers=layers), own, IDS, VOCAB, {})
    assert load_eagle(tmp_path, deep, deep_llama_path).config.aux_layers == layers


def test_a_shipped_head_is_for_exactly_one_model(
    tiny_model: TinyModel, deep: Transformer, deep_llama_path: Path, saved: Path
) -> None:
    shipped = saved.parent.parent
    assert shipped_eagle(deep, deep_llama_path, shipped) is not None
    other = tiny_model("Qwen3", num_hidden_layers=4)
    assert shipped_eagle(deep, other, shipped) is None
    assert shipped_eagle(deep, deep_llama_path) is None
    with pytest.raises(ModelError, match="trained for other weights"):
        load_eagle(saved, deep, other)


Damage = Callable[[Path], object]


def edit(**changes: object) -> Damage:
    def damage(folder: Path) -> None:
        about = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**about, **changes}))

    return damage


def put(**changes: Tensor | None) -> Damage:
    """Tensors with these names, or none; `__` stands for a dot."""

    def damage(folder: Path) -> None:
        tensors: dict[str, Tensor | None] = dict(load_file(folder / "model.safetensors"))
        tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
        save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")

    return damage


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "cannot read"),
        (pickled, r"pytorch_model\.bin is a pickle, .*; convert it .*weights_only=True"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"model\.safetensors is missing"),
        (cut_short, "damaged or cut short"),
        (edit(num_hidden_layers=2), "num_hidden_layers must be 1"),
        (edit(hidden_act="gelu"), "hidden_act must be 'silu'"),
        (edit(use_sliding_window=True), "use_sliding_window must be False"),
        (edit(num_key_value_heads=3), r"num_key_value_heads must be a divisor of num_attention_heads \(4\)"),
        (edit(hidden_size=128), "hidden_size must be 64, the target's"),
        (edit(target_hidden_size=128), "target_hidden_size must be 64, the target's"),
        (edit(vocab_size=321), "vocab_size must be 320, the target's"),
        (edit(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_type must be default, linear or llama3"),
        (edit(eagle_config={AUX: [0, 1, 3]}), "3 layers in ascending order from 0 to 2"),
        (edit(eagle_config={AUX: [0, 1]}), "3 layers in ascending order from 0 to 2"),
        (edit(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state must be True"),
        (edit(eagle_config={}, **{AUX: [3, 2, 1]}), "3 layers in ascending order from 0 to 3"),
        (edit(fc_norm=True, norm_before_fc=True), "fc_norm must be false where norm_before_fc is true"),
        (edit(fc_norm=True), r"'fc_norm\.0\.weight' is missing"),
        (edit(norm_output="yes"), "norm_output must be true or false"),
        (edit(draft_vocab_size=8), r"'d2t' has the shape \(7,\), expected \(8,\)"),
        (
            edit(intermediate_size=97),
            r"gate_proj\.weight' has the shape \(96, 64\), expected \(97, 64\)",
        ),
        (put(d2t=None), "'d2t' is missing"),
        (put(d2t=D2T.float()), "'d2t' holds torch.float32, expected integers"),
        (put(d2t=D2T + 1), "'d2t' must name different tokens below 320"),
        (put(d2t=-torch.arange(7)), "'d2t' must name different tokens below 320"),
        (put(fc__weight=torch.zeros(64, 64)), r"'fc\.weight' has the shape \(64, 64\), expected \(64, 192\)"),
        (put(fc__weight=None), r"'fc\.weight' is missing"),
        (put(fc__bias=torch.zeros(64)), r"'fc\.bias' belongs to no EAGLE3 head"),
        (put(layers__1__norm=torch.zeros(64)), r"'layers\.1\.norm' belongs to no EAGLE3 head"),
        (
            edit(speculators_model_type="eagle", transformer_layer_config=LAYER),
            "type must be 'eagle3'",
        ),
    ],
)
def test_bad_folders_are_named(
    tensors: dict[str, Tensor],
    deep: Transformer,
    deep_llama_path: Path,
    tmp_path: Path,
    damage: Damage,
    message: str,
) -> None:
    folder = write(tmp_path / "head", {**SAFEAILAB, "eagle_config": {AUX: [0, 1, 2]}}, tensors)
    damage(folder)
    with pytest.raises(ModelError, match=message):
        load_eagle(folder, deep, deep_llama_path)


@pytest.mark.demo
def test_a_head_for_the_demo_model_ships(demo_path: Path) -> None:
    model = load_model(demo_path, TorchKernels(), torch.float32, CPU)
    head = shipped_eagle(model, demo_path)
    assert head is not None
    assert head.config.aux_layers == (2, 15, 27)
    with torch.inference_mode():
        features = head.fuse(torch.randn(2, 3 * model.config.hidden_size))
        assert head.logits(features).isfinite().all()

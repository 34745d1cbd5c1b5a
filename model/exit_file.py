"""Trained exit heads on disk: exits.json says what they are and how they came about, exits.safetensors holds tensors.

The projection is not stored: its rows are those of the target's own head.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from verdraft.model.config import ModelConfig
from verdraft.model.errors import ModelError
from verdraft.model.exit_head import Adapt, ExitHead, Exits, TokenIds, check_layers
from verdraft.model.transformer import Transformer
from verdraft.model.weights import fingerprint, open_weights

FORMAT = 1
NAMES = ("draft", "check")
SHIPPED = Path(__file__).parent / "heads"


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """RMSNorm, then gated MLP + linear map of what it gives, then RMSNorm; `wide` stacks [gate | up | linear map]."""

    norm: Tensor  # [hidden]
    wide: Tensor  # [2 * inner + hidden, hidden]
    down: Tensor  # [hidden, inner]
    out_norm: Tensor  # [hidden]

    @property
    def inner(self) -> int:
        return self.down.shape[1]


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """One head as it is stored."""

    layer: int
    token_ids: TokenIds  # [R] ascending
    weights: AdapterWeights


def save_exits(folder: Path, model: Path, heads: tuple[TrainedHead, TrainedHead], record: Mapping[str, Any]) -> None:
    """Write the heads of the model in folder `model`; half precision. `record` tells data, steps and figures."""
    tensors: dict[str, Tensor] = {}
    about: dict[str, Any] = {"format": FORMAT, "model": fingerprint(model)}
    for name, head in zip(NAMES, heads, strict=True):
        about[name] = {"layer": head.layer, "vocabulary": len(head.token_ids), "inner": head.weights.inner}
        tensors[f"{name}.token_ids"] = torch.from_numpy(head.token_ids).int()
        for part in AdapterWeights.__slots__:
            tensors[f"{name}.{part}"] = getattr(head.weights, part).half().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "exits.safetensors")
    (folder / "exits.json").write_text(json.dumps({**about, "training": record}, indent=2) + "\n", encoding="utf-8")


def load_exits(folder: Path, model: Transformer, path: Path) -> Exits:
    """The trained heads in `folder` for the model that was loaded from `path`.

    Raises ModelError when they are missing, damaged or were trained for other weights.
    """
    file, about = folder / "exits.json", _read_about(folder / "exits.json")
    if about.get("model") != fingerprint(path):
        raise ModelError(f"{file}: these exit heads were trained for other weights than those in {path}")
    heads = _read_heads(folder, about, model.config)
    check_layers((heads[0].layer, heads[1].layer), model.config.num_layers)
    return assemble(heads, model, path)


def shipped_exits(model: Transformer, path: Path, shipped: Path = SHIPPED) -> Exits:
    """The heads that come with verdraft for exactly this model; no exits when there are none."""
    for file in sorted(shipped.glob("*/exits.json")):
        if _read_about(file).get("model") == fingerprint(path):
            return load_exits(file.parent, model, path)
    return Exits()


@torch.inference_mode()
def assemble(heads: tuple[TrainedHead, TrainedHead], model: Transformer, path: Path) -> Exits:
    """Heads that run: packed, with the target's rows. Equal vocabularies share one projection."""
    projections: dict[bytes, Any] = {}
    ready = []
    for head in heads:
        key = head.token_ids.tobytes()
        if key not in projections:
            projections[key] = model.kernels.pack_rounded(head_rows(model, path, head.token_ids))
        ready.append(
            ExitHead(
                layer=head.layer,
                token_ids=head.token_ids,
                kernels=model.kernels,
                adapt=_adapt(model, head.weights),
                projection=projections[key],
            )
        )
    return Exits(tuple(ready))


def head_rows(model: Transformer, path: Path, token_ids: TokenIds) -> Tensor:  # [R, hidden]
    """Those rows of the target's output matrix."""
    index = torch.from_numpy(token_ids)
    if model.config.tied_head:
        return model.embedding[index.to(model.device)]
    with open_weights(path, model.dtype, model.device) as weights:
        return weights.take("lm_head.weight", model.config.vocab_size, model.config.hidden_size)[index]


def _adapt(model: Transformer, weights: AdapterWeights) -> Adapt:
    kernels, eps, inner = model.kernels, model.config.norm_eps, weights.inner
    norm, out_norm = (w.to(model.device, model.dtype) for w in (weights.norm, weights.out_norm))
    wide, down = (kernels.pack_rounded(w.to(model.device, model.dtype)) for w in (weights.wide, weights.down))

    def adapt(hidden: Tensor) -> Tensor:
        product = kernels.linear(kernels.rms_norm(hidden, norm, eps), wide)
        mixed = kernels.linear(kernels.silu_mul(product[:, : 2 * inner]), down)
        return kernels.rms_norm(mixed.add_(product[:, 2 * inner :]), out_norm, eps)

    return adapt


def _read_about(file: Path) -> Mapping[str, Any]:
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read the exit heads' {file}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ModelError(f"{file}: expected exit heads of format {FORMAT}")
    return about


def _read_heads(folder: Path, about: Mapping[str, Any], config: ModelConfig) -> tuple[TrainedHead, TrainedHead]:
    file = folder / "exits.safetensors"
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is missing or damaged: {error}") from error
    draft, check = (_read_head(folder, name, about, tensors, config) for name in NAMES)
    return draft, check


def _read_head(
    folder: Path, name: str, about: Mapping[str, Any], tensors: Mapping[str, Tensor], config: ModelConfig
) -> TrainedHead:
    said = about.get(name)
    sizes = [said.get(key) if isinstance(said, dict) else None for key in ("layer", "vocabulary", "inner")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ModelError(f"{folder / 'exits.json'}: {name} must give layer, vocabulary and inner as positive integers")
    layer, vocabulary, inner = (int(size or 0) for size in sizes)
    take = partial(_take, folder / "exits.safetensors", tensors)
    hidden = config.hidden_size
    ids = take(f"{name}.token_ids", vocabulary).long()
    if not bool((ids[1:] > ids[:-1]).all()) or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
        raise ModelError(f"{folder / 'exits.safetensors'}: {name}.token_ids must ascend below {config.vocab_size}")
    weights = AdapterWeights(
        take(f"{name}.norm", hidden),
        take(f"{name}.wide", 2 * inner + hidden, hidden),
        take(f"{name}.down", hidden, inner),
        take(f"{name}.out_norm", hidden),
    )
    return TrainedHead(layer, ids.numpy(), weights)


def _take(file: Path, tensors: Mapping[str, Tensor], name: str, *shape: int) -> Tensor:
    found = tensors.get(name)
    if found is None or tuple(found.shape) != shape:
        got = "is missing" if found is None else f"has the shape {tuple(found.shape)}"
        raise ModelError(f"{file}: the tensor {name!r} {got}, expected {shape}")
    return found

"""EAGLE3 heads on disk: published folders of all formats, and our own, which are of SafeAILab's (PAPERS 4.2).

Ours leave out what the target has: the embedding, and the projection, whose rows are those of the target's own head.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from verdraft.model.config import Fields, read_json
from verdraft.model.eagle import LAYER, EagleConfig, EagleHead, assemble_eagle, tensor_shapes
from verdraft.model.eagle_published import describe, layer_fields, read_eagle_config, renamed
from verdraft.model.errors import ModelError
from verdraft.model.exit_file import SHIPPED, head_rows
from verdraft.model.exit_head import TokenIds
from verdraft.model.transformer import Transformer
from verdraft.model.weights import Weights, fingerprint, open_weights

PICKLE, WEIGHTS = "pytorch_model.bin", "model.safetensors"
OURS = "verdraft"  # the section of config.json that says which weights a head is for, and how it came about
IGNORED = frozenset({"t2d", f"{LAYER}.self_attn.rotary_emb.inv_freq"})  # told by d2t and by the config


def save_eagle(
    folder: Path,
    model: Path,
    config: EagleConfig,
    tensors: Mapping[str, Tensor],
    token_ids: TokenIds,
    vocab_size: int,
    record: Mapping[str, Any],
) -> None:
    """Write a head that drafts `token_ids` [R] for the model in folder `model`; half precision. `tensors` are those of
    `tensor_shapes` without the projection. `record` tells data, steps and figures."""
    offsets = token_ids - np.arange(len(token_ids))
    stored = {name: tensor.half().contiguous() for name, tensor in tensors.items()}
    about = describe(config, vocab_size, len(token_ids)) | {OURS: {"model": fingerprint(model), "training": record}}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**stored, "d2t": torch.from_numpy(offsets)}, folder / WEIGHTS, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def load_eagle(folder: Path, model: Transformer, path: Path) -> EagleHead:
    """The EAGLE3 head in `folder` for the model that was loaded from `path`.

    Raises ModelError when it is missing, damaged, of no known format or made for another model.
    """
    fields = Fields(read_json(folder / "config.json"), folder / "config.json")
    made_for = fields.section(OURS).values.get("model")
    if made_for is not None and made_for != fingerprint(path):
        raise ModelError(f"{fields.file}: this EAGLE3 head was trained for other weights than those in {path}")
    _refuse_pickles(folder)
    with open_weights(folder, model.dtype, model.device) as weights:
        return _Loader(fields, weights, model, path).head()


def shipped_eagle(model: Transformer, path: Path, shipped: Path = SHIPPED) -> EagleHead | None:
    """The head that comes with verdraft for exactly this model, if any."""
    for file in sorted(shipped.glob("*/eagle/config.json")):
        if Fields(read_json(file), file).section(OURS).values.get("model") == fingerprint(path):
            return load_eagle(file.parent, model, path)
    return None


def _refuse_pickles(folder: Path) -> None:
    if (folder / PICKLE).is_file() and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder / PICKLE} is a pickle, which can run code and is not loaded; convert it where you trust it: "
            f'python -c "import torch, safetensors.torch as s; '
            f"s.save_file(torch.load('{PICKLE}', weights_only=True), '{WEIGHTS}')\""
        )


class _Loader:
    """One folder's tensors, each checked."""

    def __init__(self, fields: Fields, weights: Weights, model: Transformer, path: Path) -> None:
        self.fields = fields
        self.weights = weights
        self.model = model
        self.path = path
        self.file_name = renamed(weights.names)
        head_norms = f"{LAYER}.self_attn.q_norm.weight" in self.file_name
        self.config = read_eagle_config(fields, model.config.num_layers, head_norms)
        self.vocab_size = layer_fields(fields).count("vocab_size")

    def head(self) -> EagleHead:
        self._check_target()
        ids = self._token_ids()
        shapes = tensor_shapes(self.config, len(ids)) | self._own_embedding()
        self._refuse_unknown(frozenset(shapes))
        tied = "lm_head.weight" not in self.file_name
        tensors = {name: self._take(name, shape) for name, shape in shapes.items() if not tied or "lm_head" not in name}
        order = np.argsort(ids)
        rows = self._target_rows(ids) if tied else tensors["lm_head.weight"]
        tensors["lm_head.weight"] = rows[torch.from_numpy(order).to(rows.device)]
        return assemble_eagle(self.config, tensors, ids[order], self.model)

    def _check_target(self) -> None:
        target, layer = self.model.config, layer_fields(self.fields)
        if self.config.target_hidden_size != target.hidden_size:
            said = self.fields.values.get("target_hidden_size") is not None
            where, name = (self.fields, "target_hidden_size") if said else (layer, "hidden_size")
            raise where.error(name, f"{target.hidden_size}, the target's")
        if self.vocab_size != target.vocab_size:
            raise layer.error("vocab_size", f"{target.vocab_size}, the target's")

    def _token_ids(self) -> TokenIds:  # [R]
        """In the order of the projection's rows."""
        size = self.fields.count("draft_vocab_size", self.vocab_size)
        ids: TokenIds = np.arange(size, dtype=np.int64)
        if "d2t" in self.file_name or size != self.vocab_size:
            ids = ids + self.weights.integers("d2t", size)
        if len(np.unique(ids)) != size or ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ModelError(f"{self.fields.file.parent}: 'd2t' must name different tokens below {self.vocab_size}")
        return ids

    def _own_embedding(self) -> dict[str, tuple[int, ...]]:
        if "embed_tokens.weight" in self.file_name:
            return {"embed_tokens.weight": (self.vocab_size, self.config.hidden_size)}
        if self.config.hidden_size != self.model.config.hidden_size:
            raise ModelError(
                f"the tensor 'embed_tokens.weight' is missing from {self.fields.file.parent}, and the target's is as "
                f"wide as its hidden size {self.model.config.hidden_size}, not {self.config.hidden_size}"
            )
        return {}

    def _target_rows(self, ids: TokenIds) -> Tensor:
        if self.config.hidden_size != self.model.config.hidden_size:
            raise ModelError(f"the tensor 'lm_head.weight' is missing from {self.fields.file.parent}")
        return head_rows(self.model, self.path, ids)

    def _refuse_unknown(self, known: frozenset[str]) -> None:
        if unknown := sorted(self.file_name.keys() - known - IGNORED - {"d2t"}):
            raise ModelError(
                f"{self.fields.file.parent}: the tensor {self.file_name[unknown[0]]!r} belongs to no EAGLE3 head as "
                "config.json describes it"
            )

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.weights.take(self.file_name.get(name, name), *shape)

"""A folder in Hugging Face format becomes a Transformer: names and shapes of tensors, fused and packed."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from verdraft.kernels.base import FusedLayers, Kernels, LayerForm, LayerWeights
from verdraft.model.config import ModelConfig, read_config
from verdraft.model.layers import (
    Heads,
    Layer,
    LearnedPositions,
    Norm,
    RotaryPositions,
    after_adding,
    llama_layer,
    no_head_norm,
)
from verdraft.model.part import WHOLE, Part
from verdraft.model.rope import inverse_frequencies, rope_tables
from verdraft.model.transformer import Transformer
from verdraft.model.weights import open_weights


def load_model(
    path: Path, kernels: Kernels, dtype: torch.dtype, device: torch.device, part: Part = WHOLE
) -> Transformer:
    """Load a folder in Hugging Face format, or a part of its layers. Raises ModelError for anything missing, damaged or
    unsupported."""
    config = read_config(path)
    with torch.inference_mode(), open_weights(path, dtype, device) as weights:
        return assemble_model(config, kernels, weights, device, part)


class TensorSource(Protocol):
    """Where a model's tensors come from."""

    def take(self, name: str, *shape: int) -> Tensor:
        """One tensor in the model's float type, on its device. Raises ModelError."""
        ...


def assemble_model(
    config: ModelConfig, kernels: Kernels, weights: TensorSource, device: torch.device, part: Part = WHOLE
) -> Transformer:
    """A model from tensors named as its family names them. The caller sets torch.inference_mode."""
    loader = _OptLoader if config.family == "opt" else _LlamaLoader
    return loader(config, kernels, weights, device, part).load()


class _LlamaLoader:
    """Llama and those that name their tensors as Llama does."""

    prefix = "model"
    final = "model.norm"

    def __init__(
        self, config: ModelConfig, kernels: Kernels, weights: TensorSource, device: torch.device, part: Part
    ) -> None:
        self.config = config
        self.part = part
        self.num_heads, self.num_kv_heads = config.num_heads // part.size, config.num_kv_heads // part.size
        self.kernels = kernels
        self.weights = weights
        self.device = device

    def load(self) -> Transformer:
        config = self.config
        embedding = self.weights.take(f"{self.prefix}.embed_tokens.weight", config.vocab_size, config.hidden_size)
        positions = self.positions()
        layers, fused = self.layers(positions)
        return Transformer(
            config=config,
            kernels=self.kernels,
            embedding=embedding,
            positions=positions,
            layers=layers,
            fused=fused,
            final_norm=self.norm(self.final, config.hidden_size),
            head=self.kernels.pack(embedding if config.tied_head else self.untied_head()),
            num_parts=self.part.size,
        )

    def untied_head(self) -> Tensor:
        return self.weights.take("lm_head.weight", self.config.vocab_size, self.config.hidden_size)

    def positions(self) -> RotaryPositions | LearnedPositions:
        config = self.config
        inverse = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        cos, sin = rope_tables(inverse, config.max_model_len)
        return RotaryPositions(self.kernels, cos.to(self.device), sin.to(self.device))

    def layers(self, positions: RotaryPositions | LearnedPositions) -> tuple[Sequence[Layer], FusedLayers | None]:
        """All layers, one by one and as the backend fuses them."""
        config = self.config
        assert isinstance(positions, RotaryPositions)
        form = LayerForm(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.norm_eps,
            cos=positions.cos,
            sin=positions.sin,
        )
        weights = [self.layer_weights(f"{self.prefix}.layers.{index}") for index in range(config.num_layers)]
        layers = tuple(llama_layer(self.kernels, layer, form, self.part) for layer in weights)
        return layers, self.kernels.fuse(weights, form) if self.part.size == 1 else None

    def layer_weights(self, prefix: str) -> LayerWeights:
        config, attention, mlp = self.config, f"{prefix}.self_attn", f"{prefix}.mlp"
        inner = config.intermediate_size
        return LayerWeights(
            attention_norm=self.weights.take(f"{prefix}.input_layernorm.weight", config.hidden_size),
            qkv=self.qkv(attention),
            head_norms=self.head_norms(attention),
            output=self.output(f"{attention}.o_proj"),
            mlp_norm=self.weights.take(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
            up=self.packed([f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], bias=config.mlp_bias),
            down=self.packed([f"{mlp}.down_proj"], [config.hidden_size], inner, config.mlp_bias),
        )

    def qkv(self, attention: str) -> Any:
        config = self.config
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        names = [f"{attention}.{part}_proj" for part in "qkv"]
        return self.packed(names, [queries, keys, keys], bias=config.qkv_bias)

    def output(self, name: str) -> Any:
        config = self.config
        return self.packed([name], [config.hidden_size], config.num_heads * config.head_dim, config.output_bias)

    def head_norms(self, attention: str) -> tuple[Tensor, Tensor] | None:
        if self.config.family != "qwen3":
            return None
        q, k = (self.weights.take(f"{attention}.{part}_norm.weight", self.config.head_dim) for part in "qk")
        return q, k

    def norm(self, name: str, size: int) -> Norm:
        weight = self.weights.take(f"{name}.weight", size)
        return partial(self.kernels.rms_norm, weight=weight, eps=self.config.norm_eps)

    def packed(self, names: Sequence[str], rows: Sequence[int], columns: int | None = None, bias: bool = False) -> Any:
        """This part of the weights of `names`, stacked along their outputs (`rows` each), packed for `linear`."""
        columns, take, own = columns or self.config.hidden_size, self.weights.take, self.part.rows
        weight = _stack([own(take(f"{name}.weight", n, columns)) for name, n in zip(names, rows, strict=True)])
        if not bias:
            return self.kernels.pack(weight)
        biases = [own(take(f"{name}.bias", n)) for name, n in zip(names, rows, strict=True)]
        return self.kernels.pack(weight, _stack(biases))


class _OptLoader(_LlamaLoader):
    """OPT: LayerNorm with biases, learned positions, ReLU."""

    prefix = "model.decoder"
    final = "model.decoder.final_layer_norm"

    def positions(self) -> RotaryPositions | LearnedPositions:
        rows = self.config.max_model_len + 2
        table = self.weights.take(f"{self.prefix}.embed_positions.weight", rows, self.config.hidden_size)
        return LearnedPositions(self.kernels, table)

    def layers(self, positions: RotaryPositions | LearnedPositions) -> tuple[Sequence[Layer], None]:
        return tuple(self.layer(f"{self.prefix}.layers.{index}") for index in range(self.config.num_layers)), None

    def layer(self, prefix: str) -> Layer:
        config, attention = self.config, f"{prefix}.self_attn"
        inner = config.intermediate_size
        return Layer(
            kernels=self.kernels,
            heads=Heads(self.num_heads, self.num_kv_heads, config.head_dim),
            attention_norm=self.norm(f"{prefix}.self_attn_layer_norm", config.hidden_size),
            qkv=self.qkv(attention),
            prepare=no_head_norm,
            output=self.output(f"{attention}.out_proj"),
            mlp_norm=after_adding(self.norm(f"{prefix}.final_layer_norm", config.hidden_size)),
            up=self.packed([f"{prefix}.fc1"], [inner], bias=config.mlp_bias),
            activation=torch.relu_,
            down=self.packed([f"{prefix}.fc2"], [config.hidden_size], inner, config.mlp_bias),
            gather=self.part.gather,
        )

    def norm(self, name: str, size: int) -> Norm:
        weight, bias = (self.weights.take(f"{name}.{part}", size) for part in ("weight", "bias"))
        return partial(self.kernels.layer_norm, weight=weight, bias=bias, eps=self.config.norm_eps)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))

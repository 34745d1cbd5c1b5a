"""The EAGLE3 drafter: one decoder layer over the target's hidden states and its own (PAPERS 4.1).

Row t pairs the feature of position t with the embedding of token t + 1 and guesses token t + 2. Everything here is
draft side, free to be wrong. Knows no engine, no request and no file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from verdraft.kernels.base import Batch, DrafterWeights, FusedDrafter, Kernels, LayerForm, LayerKV, LayerWeights
from verdraft.model.exit_head import TokenIds
from verdraft.model.layers import Layer, Norm, RotaryPositions, llama_layer
from verdraft.model.rope import RopeScaling, inverse_frequencies, rope_tables
from verdraft.model.transformer import Transformer

NUM_AUX: Final = 3  # hidden states of the target that a feature is made of
LAYER: Final = "midlayer"  # the prefix of the decoder layer's tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """One EAGLE3 head. The flags are published variants; without any it is the paper's."""

    hidden_size: int
    target_hidden_size: int
    aux_layers: tuple[int, int, int]  # ascending; the stream that enters layer i, which is the one behind layer i - 1
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False  # Qwen3's norms over every query and key head
    norm_before_residual: bool = False  # the layer adds to the normed feature
    fc_norm: bool = False  # a norm over each hidden state before fc
    norm_before_fc: bool = False  # one norm over all of them before fc
    norm_output: bool = False  # the next feature is what the projection reads, behind the final norm


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The paper's choice: early, middle, late."""
    return 2, num_layers // 2, num_layers - 3


def tensor_shapes(config: EagleConfig, num_ids: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a head by their published names (PAPERS 4.2), without an embedding of its own."""
    hidden, aux = config.hidden_size, NUM_AUX * config.target_hidden_size
    sizes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, aux), "lm_head.weight": (num_ids, hidden)}
    sizes |= {f"{LAYER}.{name}.weight": shape for name, shape in _layer_shapes(config).items()}
    sizes["norm.weight"] = (hidden,)
    if config.norm_before_fc:
        sizes["input_norm.weight"] = (aux,)
    if config.fc_norm:
        sizes |= {f"fc_norm.{part}.weight": (config.target_hidden_size,) for part in range(NUM_AUX)}
    for name, biased in _BIASES.items():
        if getattr(config, biased):
            sizes[f"{LAYER}.{name}.bias"] = sizes[f"{LAYER}.{name}.weight"][:1]
    return sizes


_BIASES: Final = {
    **{f"self_attn.{part}_proj": "qkv_bias" for part in "qkv"},
    "self_attn.o_proj": "output_bias",
    **{f"mlp.{part}_proj": "mlp_bias" for part in ("gate", "up", "down")},
}


def _layer_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        **{f"{name}_layernorm": (hidden,) for name in ("input", "post_attention")},
        "hidden_norm": (hidden,),
        **{f"self_attn.{part}_proj": (n, 2 * hidden) for part, n in zip("qkv", (queries, keys, keys), strict=True)},
        "self_attn.o_proj": (hidden, queries),
        **{f"mlp.{part}_proj": (inner, hidden) for part in ("gate", "up")},
        "mlp.down_proj": (hidden, inner),
    }
    return shapes | ({f"self_attn.{part}_norm": (dim,) for part in "qk"} if config.head_norms else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleHead:
    """An EAGLE3 drafter that runs; made by `assemble_eagle`. The caller sets torch.inference_mode."""

    config: EagleConfig
    token_ids: TokenIds  # [R] ascending; column r of the logits belongs to token_ids[r], others cannot be drafted
    kernels: Kernels
    embedding: Tensor  # [vocab, hidden]
    positions: RotaryPositions
    aux_norms: Sequence[Norm]  # none, one over the whole row, or one over each third
    fc: Any  # packed [hidden, 3 * target_hidden]
    embedding_norm: Norm
    layer: Layer  # reads [embedding | feature]; its attention norm is the feature's
    fused: FusedDrafter | None  # the embedding's norm, the layer and what follows, where the backend does all at once
    final_norm: Norm
    projection: Any  # packed [R, hidden]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token's K and V take in the drafter's pool."""
        return 2 * self.config.num_kv_heads * self.config.head_dim * self.embedding.dtype.itemsize

    def new_pool(self, num_blocks: int, block_size: int) -> Sequence[LayerKV]:
        """Pages for the drafter's one layer, to be addressed by the block tables of the target's pool."""
        config, table = self.config, self.embedding
        return self.kernels.pool(
            1, num_blocks, block_size, config.num_kv_heads, config.head_dim, table.dtype, table.device
        )

    def fuse(self, aux: Tensor) -> Tensor:  # [T, 3 * target_hidden] -> [T, hidden]
        """Features from the target's hidden states, those of `aux_layers` side by side."""
        if self.aux_norms:
            parts = aux.chunk(len(self.aux_norms), -1)
            aux = torch.cat([norm(part) for norm, part in zip(self.aux_norms, parts, strict=True)], -1)
        return self.kernels.linear(aux, self.fc)

    def forward(self, features: Tensor, tokens: Tensor, batch: Batch, pool: Sequence[LayerKV]) -> Tensor:
        """features [T, hidden] of positions t and the tokens [T] int64 behind them -> [T, hidden], the features of
        positions t + 1 as far as the drafter can tell. `batch` says t; K and V are written at its slots."""
        if self.fused is not None:
            return self.fused(features, tokens, batch, pool[0])
        embedded = self.embedding_norm(F.embedding(tokens, self.embedding))
        normed = self.layer.attention_norm(features)
        residual = normed if self.config.norm_before_residual else features
        place = self.positions.placing(batch.positions)
        hidden = self.layer.add_to(residual, torch.cat((embedded, normed), -1), batch, pool[0], place)
        return self.final_norm(hidden) if self.config.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, R] float32
        """Scores over `token_ids` of what follows, from what `forward` returned."""
        normed = hidden if self.config.norm_output else self.final_norm(hidden)
        return self.kernels.linear(normed, self.projection).float()


def assemble_eagle(
    config: EagleConfig, tensors: Mapping[str, Tensor], token_ids: TokenIds, target: Transformer
) -> EagleHead:
    """A head that drafts for `target`, from tensors as `tensor_shapes` tells.

    `embed_tokens.weight` may be missing, then it is the target's.
    """
    return _Assembly(config, tensors, target).head(token_ids)


@dataclass(frozen=True, slots=True)
class _Assembly:
    config: EagleConfig
    tensors: Mapping[str, Tensor]
    target: Transformer

    @torch.inference_mode()
    def head(self, token_ids: TokenIds) -> EagleHead:
        positions, weights = self.positions(), self.drafter_weights()
        form = self.form(positions)
        return EagleHead(
            config=self.config,
            token_ids=token_ids,
            kernels=self.target.kernels,
            embedding=weights.embedding,
            positions=positions,
            aux_norms=self.aux_norms(),
            fc=self.packed("fc"),
            embedding_norm=self.norm(f"{LAYER}.input_layernorm"),
            layer=llama_layer(self.target.kernels, weights.layer, form),
            fused=self.target.kernels.fuse_drafter(weights, form),
            final_norm=self.norm("norm"),
            projection=self.packed("lm_head"),
        )

    def positions(self) -> RotaryPositions:
        config, device = self.config, self.target.device
        inverse = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        cos, sin = rope_tables(inverse, self.target.config.max_model_len)
        return RotaryPositions(self.target.kernels, cos.to(device), sin.to(device))

    def form(self, positions: RotaryPositions) -> LayerForm:
        config = self.config
        return LayerForm(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.norm_eps,
            cos=positions.cos,
            sin=positions.sin,
        )

    def aux_norms(self) -> Sequence[Norm]:
        if self.config.norm_before_fc:
            return (self.norm("input_norm"),)
        return tuple(self.norm(f"fc_norm.{part}") for part in range(NUM_AUX)) if self.config.fc_norm else ()

    def drafter_weights(self) -> DrafterWeights:
        own = "embed_tokens.weight" in self.tensors
        return DrafterWeights(
            layer=self.layer_weights(),
            embedding=self.take("embed_tokens.weight") if own else self.target.embedding,
            embedding_norm=self.take(f"{LAYER}.input_layernorm.weight"),
            final_norm=self.take("norm.weight") if self.config.norm_output else None,
            adds_to_normed=self.config.norm_before_residual,
        )

    def layer_weights(self) -> LayerWeights:
        config, attention, mlp = self.config, f"{LAYER}.self_attn", f"{LAYER}.mlp"
        q_norm, k_norm = (f"{attention}.{part}_norm.weight" for part in "qk")
        return LayerWeights(
            attention_norm=self.take(f"{LAYER}.hidden_norm.weight"),
            qkv=self.packed(*(f"{attention}.{part}_proj" for part in "qkv"), bias=config.qkv_bias),
            head_norms=(self.take(q_norm), self.take(k_norm)) if config.head_norms else None,
            output=self.packed(f"{attention}.o_proj", bias=config.output_bias),
            mlp_norm=self.take(f"{LAYER}.post_attention_layernorm.weight"),
            up=self.packed(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=config.mlp_bias),
            down=self.packed(f"{mlp}.down_proj", bias=config.mlp_bias),
        )

    def norm(self, name: str) -> Norm:
        return partial(self.target.kernels.rms_norm, weight=self.take(f"{name}.weight"), eps=self.config.norm_eps)

    def packed(self, *names: str, bias: bool = False) -> Any:
        weight = torch.cat([self.take(f"{name}.weight") for name in names])
        biases = torch.cat([self.take(f"{name}.bias") for name in names]) if bias else None
        return self.target.kernels.pack_rounded(weight, biases)

    def take(self, name: str) -> Tensor:
        return self.tensors[name].to(self.target.device, self.target.dtype).contiguous()

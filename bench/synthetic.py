"""A random Llama whose early exits agree with it at a chosen rate: layers behind the first add as little as asked."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a random model; the defaults are the demo model's, but for its depth and vocabulary."""

    layers: int
    hidden: int = 576
    inner: int = 1536
    heads: int = 9
    kv_heads: int = 3
    vocabulary: int = 8192


def write_model(folder: Path, shape: Shape, depth_scale: float) -> Path:
    """Config and fp32 weights in Hugging Face format. `depth_scale` scales what each layer but the first adds:
    0 makes every exit right, 1 none."""
    head_dim = shape.hidden // shape.heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(shape, head_dim, depth_scale), folder / "model.safetensors")
    return folder


def _weights(shape: Shape, head_dim: int, depth_scale: float) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=rng).mul_(scale * columns**-0.5)

    hidden, inner, keys = shape.hidden, shape.inner, shape.kv_heads * head_dim
    weights = {
        "model.embed_tokens.weight": matrix(shape.vocabulary, hidden, hidden**0.5),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(shape.vocabulary, hidden, 4.0),
    }
    for index in range(shape.layers):
        name, scale = f"model.layers.{index}", 1.0 if index == 0 else depth_scale
        weights |= {
            f"{name}.input_layernorm.weight": torch.ones(hidden),
            f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{name}.self_attn.q_proj.weight": matrix(hidden, hidden),
            f"{name}.self_attn.k_proj.weight": matrix(keys, hidden),
            f"{name}.self_attn.v_proj.weight": matrix(keys, hidden),
            f"{name}.self_attn.o_proj.weight": matrix(hidden, hidden, scale),
            f"{name}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.down_proj.weight": matrix(hidden, inner, scale),
        }
    return weights

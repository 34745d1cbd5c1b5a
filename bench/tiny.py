"""A model that costs nearly nothing: two random layers behind the demo model's tokenizer and chat template.

For measuring and troubling everything but the model. Its text is noise; its tokens obey the law like any other's.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from verdraft.model.demo import demo_model

HIDDEN, INNER, LAYERS, HEADS, HEAD_DIM = 32, 64, 2, 2, 16


def tiny_model(folder: Path) -> Path:
    """Write the model into `folder`, which exists; returns it."""
    demo = demo_model()
    for file in demo.glob("*token*"):
        shutil.copy(file, folder)
    config = json.loads((demo / "config.json").read_text())
    config |= {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD_DIM}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config["vocab_size"]), folder / "model.safetensors")
    return folder


def _weights(vocab_size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        scale: float = shape[-1] ** -0.5
        return torch.randn(*shape, generator=generator) * scale

    found = {"model.embed_tokens.weight": random(vocab_size, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in (f"model.layers.{index}." for index in range(LAYERS)):
        found |= {f"{layer}self_attn.{part}_proj.weight": random(HEAD_DIM, HIDDEN) for part in "kv"}
        found |= {f"{layer}self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN)}
        found |= {f"{layer}self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM)}
        found |= {f"{layer}mlp.{part}_proj.weight": random(INNER, HIDDEN) for part in ("gate", "up")}
        found |= {f"{layer}mlp.down_proj.weight": random(HIDDEN, INNER)}
        norms = ("input_layernorm", "post_attention_layernorm")
        found |= {f"{layer}{norm}.weight": torch.ones(HIDDEN) for norm in norms}
    return found

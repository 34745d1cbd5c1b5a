"""What a published EAGLE3 folder's config.json says (PAPERS 4.2). No tensor is known here.

SafeAILab's format, which AngelSlim and SpecForge share, describes the layer at its top and the target's layers in
`eagle_config`; the speculators format describes the layer in `transformer_layer_config`.
"""

from collections.abc import Mapping
from typing import Any

from verdraft.model.config import Fields, rope_scaling, rope_theta
from verdraft.model.eagle import NUM_AUX, EagleConfig, default_aux_layers

AUX = "eagle_aux_hidden_state_layer_ids"


def describe(config: EagleConfig, vocab_size: int, num_ids: int) -> dict[str, Any]:
    """config.json in SafeAILab's format; what `read_eagle_config` gives `config` for."""
    assert config.rope_scaling is None, "no head is trained with stretched frequencies"
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias)), "no head is trained with biases"
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "vocab_size": vocab_size,
        "draft_vocab_size": num_ids,
        "norm_before_residual": config.norm_before_residual,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_output": config.norm_output,
        **_described_aux(config.aux_layers),
    }


def _described_aux(layers: tuple[int, int, int]) -> dict[str, Any]:
    """Where `_aux_layers` finds them. No layer's output is the embedding, so a head that reads that gets the numbers of
    inputs (as speculators writes them)."""
    outputs = {AUX: [layer - 1 for layer in layers]} if min(layers) > 0 else {}
    inputs = {} if outputs else {AUX: list(layers)}
    return {"eagle_config": {"use_aux_hidden_state": True, **outputs}, **inputs}


def is_speculators(fields: Fields) -> bool:
    """Whether config.json is of the speculators format."""
    return "speculators_model_type" in fields.values or "speculators_config" in fields.values


def layer_fields(fields: Fields) -> Fields:
    """Where the decoder layer is described."""
    return fields.section("transformer_layer_config") if is_speculators(fields) else fields


def read_eagle_config(fields: Fields, num_layers: int, head_norms: bool) -> EagleConfig:
    """The head that config.json describes, for a target of `num_layers` layers. Raises ModelError.

    `head_norms`: there are norms of queries and keys, which only the tensors tell.
    """
    if is_speculators(fields):
        fields.require("speculators_model_type", "eagle3", "eagle3")
    layer = layer_fields(fields)
    layer.require("hidden_act", "silu", "silu")
    layer.require("num_hidden_layers", 1, 1)
    layer.require("use_sliding_window", False, False)
    hidden, heads = layer.count("hidden_size"), layer.count("num_attention_heads")
    kv_heads = layer.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise layer.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    qwen3 = layer.values.get("model_type") == "qwen3"
    bias = layer.flag("attention_bias", False)
    flags = {name: _flag(fields, name) for name in ("norm_before_residual", "fc_norm", "norm_before_fc", "norm_output")}
    if flags["fc_norm"] and flags["norm_before_fc"]:
        raise fields.error("fc_norm", "false where norm_before_fc is true")
    return EagleConfig(
        hidden_size=hidden,
        target_hidden_size=fields.count("target_hidden_size", hidden),
        aux_layers=_aux_layers(fields, num_layers),
        intermediate_size=layer.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=layer.count("head_dim", 128 if qwen3 else hidden // heads),
        norm_eps=layer.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta(layer),
        rope_scaling=rope_scaling(layer),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=layer.flag("mlp_bias", False),
        head_norms=head_norms,
        **flags,
    )


def _flag(fields: Fields, name: str) -> bool:
    """Some checkpoints keep their variants in `eagle_config`."""
    return fields.flag(name, fields.section("eagle_config").flag(name, False))


def _aux_layers(fields: Fields, num_layers: int) -> tuple[int, int, int]:
    """Layers whose input is read. `eagle_config` numbers the layers whose output that is: one less."""
    section = fields.section("eagle_config")
    section.require("use_aux_hidden_state", True, True)
    if section.values.get(AUX) is not None:
        first, second, third = _ascending(section, num_layers - 2)
        return first + 1, second + 1, third + 1
    return default_aux_layers(num_layers) if fields.values.get(AUX) is None else _ascending(fields, num_layers - 1)


def _ascending(fields: Fields, highest: int) -> tuple[int, int, int]:
    match fields.values.get(AUX):
        case [int(first), int(second), int(third)] if 0 <= first < second < third <= highest:
            return first, second, third
    raise fields.error(AUX, f"{NUM_AUX} layers in ascending order from 0 to {highest}")


def renamed(names: Mapping[str, Any] | frozenset[str]) -> dict[str, str]:
    """Our names of tensors to those in the file: the speculators format calls the layer `layers.0`."""
    return {name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name: name for name in names}

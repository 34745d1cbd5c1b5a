"""What a model is, read from a Hugging Face folder's config.json. No tensor is known here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from verdraft.model.errors import ModelError
from verdraft.model.rope import RopeScaling

Family: TypeAlias = Literal["llama", "mistral", "qwen2", "qwen3", "opt"]

_FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "OPTForCausalLM": "opt",
}


_CAUSAL_LM = "AutoModelForCausalLM"  # in auto_map: the repository's own Python instead of a known architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer. OPT has LayerNorm, learned positions, ReLU; the others RMSNorm, rope, SwiGLU."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # positions the model was trained for, at most its sliding window
    eos_token_ids: frozenset[int]
    norm_eps: float
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = False


class Fields:
    """config.json with types checked on access; every mistake is a ModelError that names the file and the field."""

    def __init__(self, values: Mapping[str, Any], file: Path) -> None:
        self.values = values
        self.file = file

    def error(self, name: str, expected: str) -> ModelError:
        return ModelError(f"{self.file}: {name} must be {expected}, got {self.values.get(name)!r}")

    def count(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, "a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def section(self, name: str) -> "Fields":
        """A nested object; empty when it is missing or null."""
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise self.error(name, "an object or null")
        return Fields(value, self.file)

    def require(self, name: str, only: object, default: object) -> None:
        """Refuse any value but the one that is implemented."""
        value = self.values.get(name)
        if (default if value is None else value) != only:
            raise self.error(name, f"{only!r} (nothing else is supported)")


def read_config(folder: Path) -> ModelConfig:
    """Read config.json and generation_config.json. Raises ModelError for a model that cannot be run as it is meant."""
    fields = Fields(read_json(folder / "config.json"), folder / "config.json")
    names = fields.values.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    family = _FAMILIES.get(str(name))
    if _CAUSAL_LM in fields.section("auto_map").values:
        raise ModelError(
            f"{fields.file}: auto_map says that the model {name!r} runs code of its own, which is never executed; "
            f"expected one of {', '.join(_FAMILIES)}, without auto_map"
        )
    if family is None:
        raise ModelError(
            f"{fields.file}: the architecture {name!r} is not supported; supported: {', '.join(_FAMILIES)}"
        )
    if fields.values.get("quantization_config"):
        raise ModelError(f"{fields.file}: quantization_config: quantised weights are not supported")
    vocab_size, generation = fields.count("vocab_size"), folder / "generation_config.json"
    eos = _eos_token_ids(fields.values, fields.file, vocab_size) | _generation_eos(generation, vocab_size)
    return _opt(fields, eos) if family == "opt" else _llama_like(family, fields, eos)


def _llama_like(family: Family, fields: Fields, eos: frozenset[int]) -> ModelConfig:
    fields.require("hidden_act", "silu", "silu")
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    bias = fields.flag("attention_bias", False)
    config = ModelConfig(
        family=family,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=fields.count("head_dim", 128 if family == "qwen3" else hidden // heads),
        max_model_len=_max_model_len(family, fields),
        eos_token_ids=eos,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta(fields),
        rope_scaling=rope_scaling(fields),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias and family != "qwen2",
        mlp_bias=fields.flag("mlp_bias", False),
        tied_head=fields.flag("tie_word_embeddings", False),
    )
    if config.head_dim % 2:
        raise fields.error("head_dim", "even, as rotation pairs its halves")
    if heads % config.num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    return config


def _opt(fields: Fields, eos: frozenset[int]) -> ModelConfig:
    fields.require("activation_function", "relu", "relu")
    fields.require("do_layer_norm_before", True, True)
    fields.require("_remove_final_layer_norm", False, False)
    fields.require("layer_norm_elementwise_affine", True, True)
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    fields.require("word_embed_proj_dim", hidden, hidden)
    bias = fields.flag("enable_bias", True)
    return ModelConfig(
        family="opt",
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("ffn_dim"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_model_len=fields.count("max_position_embeddings"),
        eos_token_ids=eos,
        norm_eps=1e-5,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        tied_head=fields.flag("tie_word_embeddings", True),
    )


def _max_model_len(family: Family, fields: Fields) -> int:
    """Inside the sliding window attention is full attention, so the window bounds what is served exactly."""
    length = fields.count("max_position_embeddings")
    slides = fields.flag("use_sliding_window", family == "mistral")
    if family == "llama" or not slides or fields.values.get("sliding_window", 0) is None:
        return length
    return min(length, fields.count("sliding_window", 4096))


def _rope_fields(fields: Fields) -> Fields:
    """transformers 5 writes `rope_parameters`; before that it was `rope_scaling`."""
    return fields.section("rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling")


def rope_theta(fields: Fields) -> float:
    """The base of the rotary frequencies."""
    rope = _rope_fields(fields)
    return rope.number("rope_theta", fields.number("rope_theta", 10000.0))


def rope_scaling(fields: Fields) -> RopeScaling | None:
    """How the rotary frequencies are stretched. Raises ModelError for ways that are not implemented."""
    rope = _rope_fields(fields)
    for part in (rope, fields):
        part.require("partial_rotary_factor", 1.0, 1.0)
    match rope.values.get("rope_type", rope.values.get("type", "default")):
        case "default":
            return None
        case "linear":
            return RopeScaling("linear", rope.number("factor", 1.0))
        case "llama3":
            return RopeScaling(
                "llama3",
                rope.number("factor", 8.0),
                rope.number("low_freq_factor", 1.0),
                rope.number("high_freq_factor", 4.0),
                rope.count("original_max_position_embeddings", fields.count("max_position_embeddings")),
            )
    raise ModelError(f"{fields.file}: rope_type must be default, linear or llama3, got {dict(rope.values)!r}")


def read_json(file: Path) -> dict[str, Any]:
    """A file's JSON object. Raises ModelError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return value


def _generation_eos(file: Path, vocab_size: int) -> frozenset[int]:
    return _eos_token_ids(read_json(file), file, vocab_size) if file.is_file() else frozenset()


def _eos_token_ids(values: Mapping[str, Any], file: Path, vocab_size: int) -> frozenset[int]:
    """An id that the model cannot say would end nothing, and masking it is impossible."""
    value = values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise ModelError(f"{file}: eos_token_id must be an integer or a list of integers, got {value!r}")
    if not all(0 <= item < vocab_size for item in ids):
        raise ModelError(
            f"{file}: eos_token_id must be below vocab_size ({vocab_size}) and not negative, got {value!r}"
        )
    return frozenset(ids)

"""What config.json and generation_config.json may say, in every spelling, and what is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verdraft.model.config import ModelConfig, read_config
from verdraft.model.errors import ModelError
from verdraft.model.rope import RopeScaling

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
OPT: dict[str, Any] = {**LLAMA, "architectures": ["OPTForCausalLM"], "ffn_dim": 96, "word_embed_proj_dim": 64}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}

Read = Callable[..., ModelConfig]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(base: dict[str, Any] = LLAMA, generation: Any = None, **changes: Any) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps({**base, **changes}))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_config(tmp_path)

    return read


def test_defaults(read: Read) -> None:
    config = read()
    assert (config.family, config.num_kv_heads, config.head_dim, config.max_model_len) == ("llama", 4, 16, 512)
    assert (config.rope_theta, config.rope_scaling, config.norm_eps) == (10000.0, None, 1e-6)
    assert config.eos_token_ids == frozenset()
    assert not any((config.tied_head, config.qkv_bias, config.output_bias, config.mlp_bias))


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
    ],
)
def test_both_spellings_of_rope(read: Read, fields: dict[str, Any]) -> None:
    config = read(**fields)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 256)


def test_linear_rope(read: Read) -> None:
    assert read(rope_scaling={"type": "linear", "factor": 2}).rope_scaling == RopeScaling("linear", 2.0)
    assert read(rope_scaling=None, rope_parameters={"rope_type": "default"}).rope_scaling is None


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, {2}),
        ([2, 3], None, {2, 3}),
        (2, {"eos_token_id": [5, 6]}, {2, 5, 6}),
        (None, {"eos_token_id": 7}, {7}),
    ],
)
def test_eos_token_ids(read: Read, config: Any, generation: Any, expected: set[int]) -> None:
    assert read(eos_token_id=config, generation=generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("Mistral", {"sliding_window": 128}, 128),
        ("Mistral", {"sliding_window": None}, 512),
        ("Mistral", {}, 512),  # transformers' default window, 4096, is longer
        ("Qwen2", {"sliding_window": 128, "use_sliding_window": False}, 512),
        ("Qwen2", {"sliding_window": 128, "use_sliding_window": True}, 128),
    ],
)
def test_the_sliding_window_bounds_the_context(
    read: Read, architecture: str, fields: dict[str, Any], expected: int
) -> None:
    assert read(architectures=[f"{architecture}ForCausalLM"], **fields).max_model_len == expected


def test_families_differ_in_biases_and_head_size(read: Read) -> None:
    qwen2, qwen3 = (read(architectures=[f"{name}ForCausalLM"]) for name in ("Qwen2", "Qwen3"))
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.head_dim) == (True, False, 16)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.head_dim) == (False, False, 128)
    opt = read(OPT)
    assert (opt.qkv_bias, opt.output_bias, opt.mlp_bias, opt.tied_head) == (True, True, True, True)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (LLAMA, {"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported"),
        (LLAMA, {"architectures": None}, "the architecture None is not supported"),
        (
            LLAMA,
            {"auto_map": {"AutoModelForCausalLM": "evil.Model"}},
            "code of its own, which is never executed",
        ),
        (LLAMA, {"auto_map": "evil"}, "auto_map must be an object or null"),
        (LLAMA, {"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        (LLAMA, {"vocab_size": None}, "vocab_size must be a positive integer, got None"),
        (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads must be a divisor"),
        (LLAMA, {"head_dim": 15}, "head_dim must be even"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        (LLAMA, {"rms_norm_eps": "x"}, "rms_norm_eps must be a positive number"),
        (LLAMA, {"attention_bias": 1}, "attention_bias must be true or false"),
        (LLAMA, {"rope_scaling": 4}, "rope_scaling must be an object or null"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type must be default, linear or llama3"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0"),
        (LLAMA, {"eos_token_id": "</s>"}, "eos_token_id must be an integer or a list of integers"),
        (LLAMA, {"eos_token_id": 999999}, "eos_token_id must be below vocab_size"),
        (LLAMA, {"eos_token_id": [2, -1]}, "eos_token_id must be below vocab_size"),
        (OPT, {"eos_token_id": 999999}, "eos_token_id must be below vocab_size"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantised weights are not supported"),
        (OPT, {"word_embed_proj_dim": 32}, "word_embed_proj_dim must be 64"),
        (OPT, {"do_layer_norm_before": False}, "do_layer_norm_before must be True"),
        (OPT, {"activation_function": "gelu"}, "activation_function must be 'relu'"),
    ],
)
def test_refused(read: Read, base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        read(base, **changes)
    assert "config.json" in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        read_config(tmp_path)

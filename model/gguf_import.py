"""A .gguf file becomes a Hugging Face folder: config, float32 safetensors, tokenizer. Runs no model."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tqdm import tqdm

from verdraft.model.cache import cached_folder, models_dir
from verdraft.model.errors import ModelError
from verdraft.model.gguf_tokenizer import write_tokenizer
from verdraft.model.rope import RopeScaling, inverse_frequencies

_FORMAT = "1"  # part of the cache key: change it when a conversion changes
_SHARD_BYTES = 4 << 30
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def import_gguf(path: Path, progress: bool = True) -> Path:
    """The Hugging Face folder of a .gguf file, converted once into the user's cache, keyed by path, size and time."""
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"cannot read the .gguf file {path}: {error.strerror}") from error
    key = hashlib.sha256(f"{_FORMAT} {path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()
    target = models_dir() / f"{path.stem}-{key[:16]}"
    return cached_folder(target, lambda folder: convert_gguf(path, folder, progress))


def convert_gguf(path: Path, folder: Path, progress: bool = True) -> None:
    """Write a .gguf file's model into an existing empty folder. Raises ModelError for what cannot be converted."""
    reader = _open(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = hf_config(metadata, {tensor.name: tensor for tensor in reader.tensors})
    write_tokenizer(metadata, folder, config["max_position_embeddings"])
    for name, value in {"config.json": config, "generation_config.json": _generation_config(metadata)}.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    _write_weights(reader.tensors, config, folder, progress)


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ModelError(f"{path} is not a readable .gguf file: {error}") from error


def hf_config(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """config.json from a .gguf file's metadata."""
    arch = _architecture(metadata, tensors)

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{arch}.{key}", default)
        if found is None or isinstance(found, list):  # a list gives every layer its own value
            raise ModelError(f"the .gguf metadata {arch}.{key} must be a single value, got {found!r}")
        return found

    heads = value("attention.head_count")
    head_dim = value("attention.key_length", value("embedding_length") // heads)
    if value("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"the .gguf metadata {arch}.rope.dimension_count must be the whole head's {head_dim}")
    context = value("context_length")
    theta = float(value("rope.freq_base", 10000.0))
    return {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": min(context, value("attention.sliding_window", context) or context),
        "rms_norm_eps": float(f"{value('attention.layer_norm_rms_epsilon'):.6g}"),  # a float32 in the file
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(metadata, arch, tensors.get("rope_freqs.weight"), head_dim, theta),
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def _architecture(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
    arch = metadata.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise ModelError(f"the .gguf architecture {arch!r} is not supported; supported: {', '.join(_ARCHITECTURES)}")
    if metadata.get(f"{arch}.expert_count"):
        raise ModelError("the .gguf file holds a mixture of experts, which is not supported")
    if "token_embd.weight" not in tensors:
        raise ModelError("the tensor 'token_embd.weight' is missing from the .gguf file")
    return str(arch)


def _rope_scaling(
    metadata: Mapping[str, Any], arch: str, factors: Any, head_dim: int, theta: float
) -> dict[str, Any] | None:
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(metadata[f"{arch}.rope.scaling.factor"])}
    if kind != "none":
        raise ModelError(f"the .gguf file's rope scaling {kind!r} is not supported; supported: linear, llama3")
    return None if factors is None else _llama3_scaling(np.asarray(factors.data, np.float32).ravel(), head_dim, theta)


def _llama3_scaling(factors: NDArray[np.float32], head_dim: int, theta: float) -> dict[str, Any]:
    """llama.cpp stores the divisors of the frequencies instead of the parameters that gave them."""
    scaling = RopeScaling("llama3", float(factors.max()))
    expected = inverse_frequencies(head_dim, theta, None) / inverse_frequencies(head_dim, theta, scaling)
    if not torch.allclose(torch.from_numpy(factors.copy()), expected, rtol=1e-3):
        raise ModelError("the .gguf file's rope_freqs are not those of Llama 3 scaling, and no other is supported")
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_len,
    }


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A turn's end (eot, eom) ends the text as eos does."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return {"eos_token_id": sorted({end for end in ends if end is not None})}


def _write_weights(tensors: Sequence[Any], config: Mapping[str, Any], folder: Path, progress: bool) -> None:
    shards = _plan_shards([tensor for tensor in tensors if tensor.name != "rope_freqs.weight"])
    weight_map: dict[str, str] = {}
    total = sum(int(tensor.n_elements) * 4 for shard in shards for tensor in shard)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Converting the model", disable=not progress) as bar:
        for number, shard in enumerate(shards, 1):
            name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            arrays = {}
            for tensor in shard:
                arrays[_hf_name(tensor.name)] = _dequantise(tensor, config)
                bar.update(int(tensor.n_elements) * 4)
            save_file(arrays, folder / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(arrays, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _plan_shards(tensors: Sequence[Any]) -> list[list[Any]]:
    shards: list[list[Any]] = [[]]
    size = 0
    for tensor in tensors:
        num_bytes = int(tensor.n_elements) * 4
        if size and size + num_bytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += num_bytes
    return shards


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block is None or block[2] not in _NAMES:
        raise ModelError(f"the .gguf file holds the tensor {name!r}, which no supported model has")
    return f"model.layers.{block[1]}.{_NAMES[block[2]]}.{kind}"


def _dequantise(tensor: Any, config: Mapping[str, Any]) -> NDArray[np.float32]:
    try:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ModelError(f"the .gguf tensor {tensor.name!r} is quantised as {kind}, which is not supported") from error
    array = np.ascontiguousarray(array, dtype=np.float32)
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    part = tensor.name.split(".")[-2]
    if config["model_type"] == "llama" and part in heads:
        return _unpermute(array, config[heads[part]])
    return array


def _unpermute(array: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """llama.cpp interleaves the two rope halves of a Llama's heads (rows a0, b0, a1, b1, ..); undo it."""
    pairs = array.reshape(num_heads, array.shape[0] // num_heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))

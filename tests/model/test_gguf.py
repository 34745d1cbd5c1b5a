"""A .gguf file written as llama.cpp writes it gives the model and the tokenizer that it was made from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from verdraft.kernels.chooser import choose_kernels
from verdraft.model.config import read_config
from verdraft.model.errors import ModelError
from verdraft.model.gguf_import import import_gguf
from verdraft.model.load import load_model
from verdraft.model.rope import RopeScaling, inverse_frequencies

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
TOKENS = [*VOCAB, *(f"[PAD{index}]" for index in range(len(VOCAB), 320))]
TYPES = [3] * len(SPECIAL) + [1] * (len(VOCAB) - len(SPECIAL)) + [5] * (320 - len(VOCAB))

NAMES = {
    "embed_tokens": "token_embd",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "norm": "output_norm",
    "lm_head": "output",
}


def permute(array: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the query and key weights of a Llama."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def write_gguf(source: Path, target: Path, pre: str = "smollm", arch: str | None = None, **metadata: Any) -> Path:
    config = read_config(source)
    writer = gguf.GGUFWriter(target, arch or config.family)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_model_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_tokenizer_model(metadata.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    if "eot" in metadata:
        writer.add_eot_token_id(metadata["eot"])
    if "rope_type" in metadata:
        writer.add_string(f"{config.family}.rope.scaling.type", metadata["rope_type"])
    for name, array in load_file(source / "model.safetensors").items():
        parts = name.split(".")
        if config.family == "llama" and parts[-2] in ("q_proj", "k_proj"):
            array = permute(array, config.num_heads if parts[-2] == "q_proj" else config.num_kv_heads)
        block = f"blk.{parts[2]}." if "layers" in parts else ""
        writer.add_tensor(f"{block}{NAMES[parts[-2]]}.{parts[-1]}", array)
    for name, array in metadata.get("tensors", {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("family", "options"),
    [("Llama", {}), ("Llama", {"tie_word_embeddings": True}), ("Qwen2", {"hidden_size": 128}), ("Qwen3", {})],
)
def test_weights_and_config_survive(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    source = tiny_model(family, **options)
    folder = import_gguf(write_gguf(source, tmp_path / "tiny.gguf"), progress=False)
    before, after = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert read_config(folder) == read_config(source)
    assert load_model(
        folder, choose_kernels("torch", torch.device("cpu"), torch.float32), torch.float32, torch.device("cpu")
    )


def test_it_is_converted_once_and_again_when_it_changes(tiny_llama_path: Path, tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tiny_llama_path, tmp_path / "tiny.gguf")
    first = import_gguf(file, progress=False)
    inode = first.stat().st_ino
    assert import_gguf(file, progress=False).stat().st_ino == inode
    file.touch()
    assert import_gguf(file, progress=False) != first
    assert first.parent == cache / "verdraft" / "models"


def test_the_tokenizer_round_trips(tiny_llama_path: Path, tmp_path: Path) -> None:
    folder = import_gguf(write_gguf(tiny_llama_path, tmp_path / "tiny.gguf"), progress=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "hello  wörld 1212\n<|im_end|>é🙂"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids[0] == TOKENS.index("hello")
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (2, 1)
    assert ids.count(2) == 1
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "1"]),
        ("qwen2", ["1", "2", "1"]),
        ("llama-bpe", ["<|im_start|>", "12", "1"]),
        ("gpt-2", ["12", "1"]),
    ],
)
def test_every_way_to_split_text(tiny_llama_path: Path, tmp_path: Path, pre: str, expected: list[str]) -> None:
    folder = import_gguf(write_gguf(tiny_llama_path, tmp_path / "tiny.gguf", pre), progress=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("121").tokens == expected


def test_llama3_text_starts_with_bos_once(tiny_llama_path: Path, tmp_path: Path) -> None:
    folder = import_gguf(write_gguf(tiny_llama_path, tmp_path / "tiny.gguf", "llama-bpe"), progress=False)
    ids = AutoTokenizer.from_pretrained(folder).encode("hello")
    assert ids == [1, TOKENS.index("hello")]


def test_the_end_of_a_turn_ends_the_text(tiny_llama_path: Path, tmp_path: Path) -> None:
    folder = import_gguf(write_gguf(tiny_llama_path, tmp_path / "tiny.gguf", eot=5), progress=False)
    assert read_config(folder).eos_token_ids == {2, 5}


def test_llama3_scaling_is_recognised(tiny_llama_path: Path, tmp_path: Path) -> None:
    scaling = RopeScaling("llama3", 32.0)
    factors = inverse_frequencies(32, 10000.0, None) / inverse_frequencies(32, 10000.0, scaling)
    file = write_gguf(tiny_llama_path, tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": factors.numpy()})
    assert read_config(import_gguf(file, progress=False)).rope_scaling == scaling


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "gemma"}, "architecture 'gemma' is not supported"),
        ({"pre": "tekken"}, "splits text the 'tekken' way"),
        ({"tokenizer": "llama"}, "tokenizer is 'llama'; only byte-level BPE"),
        ({"rope_type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"tensors": {"rope_freqs.weight": np.full(16, 3.0, np.float32)}}, "rope_freqs are not those of Llama 3"),
        ({"tensors": {"blk.0.strange.weight": np.zeros(32, np.float32)}}, "the tensor 'blk.0.strange.weight'"),
    ],
)
def test_refused(tiny_llama_path: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        import_gguf(write_gguf(tiny_llama_path, tmp_path / "tiny.gguf", **changes), progress=False)


@pytest.mark.parametrize("keep", [0, 3, 100, 20_000, 100_000])
def test_a_file_cut_short_is_named(tiny_llama_path: Path, tmp_path: Path, keep: int) -> None:
    file = write_gguf(tiny_llama_path, tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"tiny\.gguf is not a readable \.gguf file"):
        import_gguf(file, progress=False)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read the \.gguf file .*nothing\.gguf"):
        import_gguf(tmp_path / "nothing.gguf")

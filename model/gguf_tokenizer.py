"""A Hugging Face tokenizer from the metadata of a .gguf file. Byte-level BPE only; weights are not known here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from verdraft.model.errors import ModelError

# Values of tokenizer.ggml.pre that split text in the same way.
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class TokenizerMetadata:
    """The tokenizer.* entries of a .gguf file."""

    values: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"tokenizer.ggml.{key}", default)

    @property
    def tokens(self) -> list[str]:
        return list(self.get("tokens", ()))

    @property
    def adds_bos(self) -> bool:
        """Whether text starts with the BOS token; Llama 3's does without saying so."""
        return self.token("bos") is not None and bool(self.get("add_bos_token", self.get("pre") in _LLAMA3))

    def token(self, role: str) -> str | None:
        """The text of a special token: role is "bos", "eos", "padding" or "unknown"."""
        index = self.get(f"{role}_token_id")
        return None if index is None or index >= len(self.tokens) else self.tokens[index]


def write_tokenizer(metadata: Mapping[str, Any], folder: Path, max_len: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json.

    Raises ModelError for a vocabulary that is not byte-level BPE or splits text in a way not known here.
    """
    source = TokenizerMetadata(metadata)
    kind = source.get("model", "missing")
    if kind != "gpt2" or not source.tokens:
        raise ModelError(f"the .gguf file's tokenizer is {kind!r}; only byte-level BPE ('gpt2') is supported")
    build_tokenizer(source).save(str(folder / "tokenizer.json"))
    special = _special_tokens(source)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": source.adds_bos,
        **special,
    }
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "special_tokens_map.json", special)


def build_tokenizer(source: TokenizerMetadata) -> Tokenizer:
    """The tokenizer object: vocabulary, merges, the family's way to split text, special tokens."""
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in source.get("merges", ()))]
    vocab = {token: index for index, token in enumerate(source.tokens)}
    kind = source.get("pre", "default")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=kind in _LLAMA3))
    tokenizer.pre_tokenizer = _pre_tokenizer(kind)
    tokenizer.decoder = decoders.ByteLevel()
    if kind in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    for token, token_type in zip(source.tokens, source.get("token_type", ()), strict=False):
        if token_type in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=token_type == _CONTROL, normalized=False)])
    if source.adds_bos:
        bos = source.token("bos")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, source.get("bos_token_id"))]
        )
    return tokenizer


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind not in (*_LLAMA3, *_QWEN2))
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if kind in (*_LLAMA3, *_QWEN2):
        words = Regex(_WORDS % ("{1,3}" if kind in _LLAMA3 else ""))
        return pre_tokenizers.Sequence([pre_tokenizers.Split(words, behavior="isolated"), byte_level])
    if kind in ("gpt-2", "default"):
        return byte_level
    raise ModelError(f"the .gguf file splits text the {kind!r} way (tokenizer.ggml.pre), which is not supported")


def _special_tokens(source: TokenizerMetadata) -> dict[str, str]:
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    found = {name: source.token(role) for name, role in roles.items()}
    return {name: token for name, token in found.items() if token is not None}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

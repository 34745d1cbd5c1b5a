"""The exact bytes behind every entry of a vocabulary, for the two ways in which vocabularies write bytes."""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tokenizers import Tokenizer

ToBytes: TypeAlias = Callable[[str], bytes]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def bytes_of_tokens(
    tokenizer: Tokenizer, spec: Mapping[str, Any], vocab_size: int, special: frozenset[int]
) -> list[bytes | None]:
    """One entry per id in [0, vocab_size): None for special tokens and for ids that the tokenizer does not have."""
    to_bytes = _byte_level_reader() if _uses(spec, "ByteLevel") else _sentencepiece_bytes
    table: list[bytes | None] = [None] * vocab_size
    added = {entry["id"]: entry["content"] for entry in spec.get("added_tokens", [])}
    for text, token in tokenizer.get_vocab(with_added_tokens=True).items():
        if token < vocab_size and token not in special and token not in added:
            table[token] = to_bytes(text)
    for token, text in added.items():
        if token < vocab_size and token not in special:
            table[token] = text.encode()
    return table


def _uses(spec: Mapping[str, Any], kind: str) -> bool:
    """Whether the decoder (or, without one, the pre-tokenizer) is or contains a `kind`."""
    part = spec.get("decoder") or spec.get("pre_tokenizer") or {}
    parts = [part, *part.get("decoders", []), *part.get("pretokenizers", [])]
    return any(entry.get("type") == kind for entry in parts)


def _byte_level_reader() -> ToBytes:
    """Byte-level BPE writes each byte as one printable character: its own where there is one, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}

    def read(text: str) -> bytes:
        if all(char in table for char in text):
            return bytes(table[char] for char in text)
        return text.encode()

    return read


def _sentencepiece_bytes(text: str) -> bytes:
    """Sentencepiece writes a space as U+2581 and a byte without a piece of its own as <0xHH>."""
    if match := _BYTE.fullmatch(text):
        return bytes([int(match[1], 16)])
    return text.replace("\u2581", " ").encode()

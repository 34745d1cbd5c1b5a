"""Suffix stores as one file: token ids of finished answers, by tenant. Knows no model, only a name for it."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from verdraft.spec.suffix import TAIL_LEN, StoredOutputs, SuffixStores

FORMAT = 1


class SuffixFileError(Exception):
    """The file is damaged, or belongs to another model or version; the message is a sentence."""


def pack_stores(stores: SuffixStores, model: str) -> bytes:
    """The contents of a file. Tenants are named by digests of their salts."""
    found = {name: store.stored() for name, store in stores.all().items()}
    about = {"format": str(FORMAT), "model": model, "stores": json.dumps(list(found)), "digest": _digest(found)}
    tensors: dict[str, NDArray[np.integer]] = {}
    for name, outputs in found.items():
        tensors |= {f"tokens {name}": outputs.tokens, f"lengths {name}": outputs.lengths}
    return save(tensors, about)


def write_whole(contents: bytes, path: Path) -> None:
    """The file, whole or not at all, for its owner's eyes alone. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_stores(path: Path, model: str, vocab_size: int, stores: SuffixStores) -> None:
    """Add what a file holds to `stores`. Raises SuffixFileError, and then nothing was added."""
    try:
        with safe_open(path, "np") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        found = {
            name: StoredOutputs(tensors[f"tokens {name}"], tensors[f"lengths {name}"])
            for name in json.loads(about.get("stores", "[]"))
        }
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise SuffixFileError(f"{path} holds no readable suffix store: {error}") from error
    if about.get("format") != str(FORMAT):
        raise SuffixFileError(f"{path} was written by another version of verdraft")
    if about.get("model") != model:
        raise SuffixFileError(f"{path} belongs to another model or tokenizer")
    if about.get("digest") != _digest(found) or not all(_sound(outputs, vocab_size) for outputs in found.values()):
        raise SuffixFileError(f"{path} is damaged")
    for name, outputs in found.items():
        for tail, output in _sequences(outputs):
            stores.named(name).add(tail, output)


def _digest(found: dict[str, StoredOutputs]) -> str:
    digest = hashlib.sha256()
    for name, outputs in found.items():
        digest.update(f"{name} {len(outputs.tokens)} {len(outputs.lengths)} ".encode())
        digest.update(outputs.tokens.tobytes() + outputs.lengths.tobytes())
    return digest.hexdigest()


def _sound(outputs: StoredOutputs, vocab_size: int) -> bool:
    tokens, lengths = outputs.tokens, outputs.lengths
    if tokens.dtype != np.int32 or tokens.ndim != 1 or lengths.dtype != np.int64 or lengths.shape[1:] != (2,):
        return False
    ids = not tokens.size or bool(tokens.min() >= 0 and tokens.max() < vocab_size)
    tails, answers = lengths.T
    return ids and bool(np.all((tails >= 0) & (tails <= TAIL_LEN) & (answers > 0))) and lengths.sum() == tokens.size


def _sequences(outputs: StoredOutputs) -> Iterator[tuple[list[int], list[int]]]:
    """The context before each output, and the output."""
    end = 0
    for tail, output in outputs.lengths.tolist():
        begin, end = end, end + tail + output
        yield outputs.tokens[begin : begin + tail].tolist(), outputs.tokens[begin + tail : end].tolist()

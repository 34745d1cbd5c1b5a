"""Tensors of a Hugging Face folder's safetensors files, mapped and converted one at a time. Knows no layer."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from verdraft.model.errors import ModelError

_FILE_NAME = re.compile(r"[^/\\]+\.safetensors")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Weights:
    """Named tensors of a checkpoint; made by `open_weights`, valid inside its `with`."""

    def __init__(self, files: Mapping[Path, Any], dtype: torch.dtype, device: torch.device) -> None:
        self._file_of = {name: file for file, handle in files.items() for name in handle.keys()}  # noqa: SIM118
        self._files = files
        self._dtype = dtype
        self._device = device

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""
        return frozenset(self._file_of)

    def take(self, name: str, *shape: int) -> Tensor:
        """One tensor in the model's float type, on its device.

        Raises ModelError when it is missing, has another shape than `shape`, or holds no floats.
        """
        tensor, file = self._read(name, shape)
        if tensor.dtype not in _FLOATS:
            raise ModelError(f"{file}: the tensor {name!r} holds {tensor.dtype}, expected floats (quantised weights?)")
        # A copy: one view that lives on (an embedding, a norm) would keep the whole file's pages in memory.
        return tensor.to(device=self._device, dtype=self._dtype, copy=True)

    def integers(self, name: str, *shape: int) -> NDArray[np.int64]:
        """One tensor of integers. Raises ModelError when it is missing, has another shape, or holds something else."""
        tensor, file = self._read(name, shape)
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ModelError(f"{file}: the tensor {name!r} holds {tensor.dtype}, expected integers")
        integers: NDArray[np.int64] = tensor.long().numpy().copy()
        return integers

    def _read(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Path]:
        file = self._file_of.get(name)
        if file is None:
            raise ModelError(f"the tensor {name!r} is missing from {self._folder()}")
        found = tuple(self._files[file].get_slice(name).get_shape())
        if found != shape:
            raise ModelError(f"{file}: the tensor {name!r} has the shape {found}, expected {shape}")
        return self._files[file].get_tensor(name), file

    def _folder(self) -> str:
        return str(next(iter(self._files)).parent)


@contextmanager
def open_weights(folder: Path, dtype: torch.dtype, device: torch.device) -> Iterator[Weights]:
    """Map the single file or all shards of a folder. Raises ModelError for missing or damaged files."""
    with ExitStack() as stack:
        yield Weights({file: stack.enter_context(_open(file)) for file in _shards(folder)}, dtype, device)


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except FileNotFoundError as error:
        raise ModelError(f"the weights file {file} is missing") from error
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged or cut short: {error}") from error


def _shards(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not index.is_file():
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is not an index of safetensors files") from error
    if not all(isinstance(name, str) and _FILE_NAME.fullmatch(name) for name in names):
        raise ModelError(f"{index} must name .safetensors files of its folder (pickle weights are not loaded)")
    return [folder / name for name in names]


def fingerprint(folder: Path) -> str:
    """What tells one set of weights from another: a digest of every tensor's name, shape, type and first values."""
    digest = hashlib.sha256()
    files = {file: _open(file) for file in _shards(folder)}
    owners = {name: handle for handle in files.values() for name in handle.keys()}  # noqa: SIM118
    for name, handle in sorted(owners.items()):
        part = handle.get_slice(name)
        shape = part.get_shape()
        first = part[:1] if len(shape) > 1 else part[:64]
        digest.update(f"{name} {shape} {part.get_dtype()} ".encode())
        digest.update(first.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

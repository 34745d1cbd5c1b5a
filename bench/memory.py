"""How many bytes of tensors an object holds, wherever they are in it."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor


def tensor_bytes(root: Any, seen: set[int]) -> int:
    """Bytes of all tensors reachable from `root` that are not in `seen` (addresses of storage) yet; they are added."""
    total, visited, stack = 0, set[int](), [root]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            total += 0 if storage.data_ptr() in seen else storage.nbytes()
            seen.add(storage.data_ptr())
        elif id(item) not in visited:
            visited.add(id(item))
            stack += _parts(item)
    return total


def _parts(item: Any) -> Iterator[Any]:
    if isinstance(item, list | tuple):
        yield from item
    elif isinstance(item, dict):
        yield from item.values()
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        yield from (getattr(item, field.name) for field in dataclasses.fields(item))
    elif callable(item):
        yield from (cell.cell_contents for cell in getattr(item, "__closure__", None) or ())
        yield from getattr(item, "args", ())  # of a functools.partial
        yield from getattr(item, "keywords", {}).values()

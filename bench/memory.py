"""How many bytes of tensors an object holds, wherever they are in it."""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeAlias

from torch import Tensor

Span: TypeAlias = tuple[int, int]  # addresses, the second exclusive


def tensor_bytes(root: Any, seen: set[Span]) -> int:
    """Bytes of all tensors reachable from `root` that are not in `seen` yet, where they are added. A part of memory
    that several tensors look at counts once, and what lies in an arena beside them does not count."""
    before = _covered(seen)
    visited, stack = set[int](), [root]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            seen.add(_span(item))
        elif id(item) not in visited:
            visited.add(id(item))
            stack += _parts(item)
    return _covered(seen) - before


def _span(tensor: Tensor) -> Span:
    places = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (places * tensor.element_size() if tensor.numel() else 0)


def _covered(spans: set[Span]) -> int:
    total = reached = 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
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

"""Readers of single fields: no coercion, null is absent, the right code and `param` for every mistake.

Knows no particular field. `path` is what stands before the name in `param`, e.g. "stream_options.".
"""

from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any, TypeAlias, overload

from verdraft.server.errors import above_max, below_min, empty_array, empty_string, invalid_type, invalid_value, missing

Fields: TypeAlias = Mapping[str, Any]

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@overload
def integer(body: Fields, name: str, default: int, minimum: int = ..., maximum: int = ..., path: str = ...) -> int: ...
@overload
def integer(
    body: Fields, name: str, default: None, minimum: int = ..., maximum: int = ..., path: str = ...
) -> int | None: ...
def integer(
    body: Fields, name: str, default: int | None, minimum: int = INT64_MIN, maximum: int = INT64_MAX, path: str = ""
) -> int | None:
    """A JSON integer in [minimum, maximum]; 1.0 and true are none."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid_type(path + name, "an integer", value)
    if value < minimum:
        raise below_min(path + name, value, minimum)
    if value > maximum:
        raise above_max(path + name, value, maximum)
    return value


def number(
    body: Fields,
    name: str,
    default: float,
    minimum: float,
    maximum: float | None = None,
    open_minimum: bool = False,
    path: str = "",
) -> float:
    """A finite JSON number in [minimum, maximum], or (minimum, maximum] with `open_minimum`; integers are fine."""
    value = body.get(name)
    if value is None:
        return default
    if not is_number(value):
        raise invalid_type(path + name, "a number", value)
    if value < minimum or (open_minimum and value == minimum):
        raise below_min(path + name, value, float(minimum), exclusive=open_minimum)
    if maximum is not None and value > maximum:
        raise above_max(path + name, value, float(maximum))
    return as_float(value, path + name)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_float(value: float, name: str) -> float:
    try:
        result = float(value)
    except OverflowError:
        result = float("inf")
    if not isfinite(result):
        raise invalid_value(name, "the number is too large")
    return result


def boolean(body: Fields, name: str, default: bool = False, path: str = "") -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid_type(path + name, "true or false", value)
    return value


@overload
def string(body: Fields, name: str, default: str, path: str = ..., empty: bool = ...) -> str: ...
@overload
def string(body: Fields, name: str, default: None, path: str = ..., empty: bool = ...) -> str | None: ...
def string(body: Fields, name: str, default: str | None, path: str = "", empty: bool = True) -> str | None:
    """A string; with `empty` false it must have at least one character."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise invalid_type(path + name, "a string", value)
    if not value and not empty:
        raise empty_string(path + name)
    return value


def required_string(body: Fields, name: str, path: str = "") -> str:
    """A string of at least one character."""
    value = string(body, name, None, path, empty=False)
    if value is None:
        raise missing(path + name)
    return value


def obj(body: Fields, name: str, path: str = "") -> Fields | None:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise invalid_type(path + name, "an object", value)
    return value


def array(body: Fields, name: str, path: str = "") -> list[Any] | None:
    value = body.get(name)
    if value is not None and not isinstance(value, list):
        raise invalid_type(path + name, "an array", value)
    return value


def only(body: Fields, names: Collection[str]) -> Fields:
    """The fields of these names: the others mean something else here."""
    return {name: value for name, value in body.items() if name in names}


def text_content(value: Any, param: str, kinds: Collection[str] = ("text",)) -> str:
    """A string, or an array of text parts joined without a separator (`messages[i].content`, `prediction.content`).

    `kinds` are the types that text parts have there.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid_type(param, "a string or an array of text parts", value)
    if not value:
        raise empty_array(param)
    return "".join(part_text(part, f"{param}[{index}]", kinds) for index, part in enumerate(value))


def part_text(part: Any, param: str, kinds: Collection[str] = ("text",)) -> str:
    """The text of one part."""
    if not isinstance(part, dict):
        raise invalid_type(param, 'an object {"type": "text", "text": ...}', part)
    if part.get("type") not in kinds:
        raise invalid_value(f"{param}.type", f"only parts of type {', '.join(kinds)} are supported")
    text = part.get("text")
    if text is None:
        raise missing(f"{param}.text")
    if not isinstance(text, str):
        raise invalid_type(f"{param}.text", "a string", text)
    return text

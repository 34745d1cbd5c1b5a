"""From the bytes of a request body to one JSON object, and back. Knows no field; every refusal is an ApiError 400."""

import json
from typing import Any, NoReturn, TypeAlias

import orjson

from verdraft.server.errors import invalid_json, shown, unsupported_content_type

Body: TypeAlias = dict[str, Any]

MAX_DEPTH = 64  # levels of nested objects and arrays, the body itself being the first


def parse_body(raw: bytes, content_type: str | None) -> Body:
    """The body as a dict. Strict JSON in UTF-8 without BOM; the last of two equal keys wins.

    Raises:
        ApiError: 400 `unsupported_content_type` or `invalid_json`.
    """
    _check_content_type(content_type)
    value = _loads(raw)
    if not isinstance(value, dict):
        raise invalid_json(f"the body must be a JSON object; got {shown(value)}")
    if _too_deep(value):
        raise invalid_json(f"the body is nested deeper than {MAX_DEPTH} levels")
    return value


def dump(value: Any) -> bytes:
    """`value` as JSON in UTF-8; NaN becomes null. Integers may be of any size: parse_body() lets such through."""
    try:
        return orjson.dumps(value)
    except TypeError:  # orjson knows no integer beyond 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def _check_content_type(content_type: str | None) -> None:
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise unsupported_content_type(content_type)


def _loads(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if "infinity" in error.msg:  # 1e400, or an integer beyond float64, which only its own field can judge
            return _loads_big_integers(raw)
        raise invalid_json(f"the body is not valid JSON: {error}") from None


def _loads_big_integers(raw: bytes) -> Any:
    """The slow way: integers of any size stay exact, everything else is as strict as before."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_float=_finite, parse_constant=_not_json)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # NOTE: json.loads lets lone surrogates through
    except (ValueError, RecursionError):
        raise invalid_json("the body is not valid JSON, or holds a number that is too large") from None
    return value


def _finite(literal: str) -> float:
    value = float(literal)
    if value in (float("inf"), float("-inf")):
        raise ValueError(literal)
    return value


def _not_json(literal: str) -> NoReturn:
    raise ValueError(literal)


def _too_deep(value: Body) -> bool:
    """orjson stops at 1024 levels by itself, so walking level by level is bounded."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        children = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return True

"""Bodies: strict JSON, one object, in UTF-8."""

import gzip
from typing import Any

import pytest

from verdraft.server.errors import ApiError
from verdraft.server.jsonbody import dump, parse_body

JSON = "application/json"
OK = b'{"prompt":"a"}'

BAD = {
    "empty": b"",
    "spaces": b"   ",
    "open brace": b"{",
    "array": b"[]",
    "null": b"null",
    "number": b"3",
    "string": b'"x"',
    "trailing bytes": OK + b"x",
    "two objects": OK + OK,
    "single quotes": b"{'a':1}",
    "comment": b'{"a":1 /* x */}',
    "trailing comma": b'{"a":1,}',
    "NaN": b'{"a":NaN}',
    "-Infinity": b'{"a":-Infinity}',
    "1e400": b'{"a":1e400}',
    "-1e400 beside a huge integer": b'{"a":-1e400,"b":1' + b"0" * 400 + b"}",
    "huge float literal": b'{"a":1' + b"0" * 400 + b".5}",
    "5000 digits": b'{"a":' + b"1" * 5000 + b"}",
    "huge integer and a lone surrogate": b'{"a":1' + b"0" * 400 + rb',"b":"\ud83d"}',
    "invalid utf-8": b'{"a":"\xff"}',
    "truncated utf-8": b'{"a":"\xf0\x9f\x98"}',
    "overlong": b'{"a":"\xc0\xaf"}',
    "utf-16": '{"a":1}'.encode("utf-16"),
    "utf-32": '{"a":1}'.encode("utf-32-le"),
    "byte order mark": b"\xef\xbb\xbf" + OK,
    "gzip": gzip.compress(OK),
    "lone surrogate": rb'{"a":"\ud83d"}',
    "lone low surrogate": rb'{"a":"\ude00"}',
    "65 levels": b'{"a":' + b"[" * 64 + b"]" * 64 + b"}",
    "a million levels": b'{"a":' + b"[" * 10**6,
}


@pytest.mark.parametrize("raw", BAD.values(), ids=BAD)
def test_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as error:
        parse_body(raw, JSON)
    assert (error.value.status, error.value.code, error.value.param) == (400, "invalid_json", None)
    assert len(error.value.message) < 200


def test_the_last_of_equal_keys_wins() -> None:
    assert parse_body(b'{"a":1,"a":2}', JSON) == {"a": 2}


def test_64_levels_are_fine() -> None:
    assert "a" in parse_body(b'{"a":' + b"[" * 63 + b"]" * 63 + b"}", JSON)


def test_nul_and_surrogate_pairs_are_ordinary() -> None:
    assert parse_body(rb'{"a":"x\u0000","b":"\ud83d\ude00"}', JSON) == {"a": "x\x00", "b": "\U0001f600"}


def test_huge_integers_stay_integers() -> None:
    """A schema may hold one; only the field that it stands in can tell what is wrong with it."""
    assert parse_body(b'{"a":1' + b"0" * 400 + b',"b":1.5}', JSON) == {"a": 10**400, "b": 1.5}


@pytest.mark.parametrize("value", [{"a": "\u00e9", "b": [1, None]}, {"a": "\u00e9", "b": [10**400, None]}])
def test_what_was_parsed_can_be_written(value: Any) -> None:
    raw = dump(value)
    assert (raw[:9], parse_body(raw, JSON)) == ('{"a":"\u00e9"'.encode(), value)
    assert dump(float("nan")) == b"null"


@pytest.mark.parametrize("content_type", [JSON, "application/json; charset=utf-8", "Application/JSON"])
def test_content_type(content_type: str) -> None:
    assert parse_body(OK, content_type) == {"prompt": "a"}


@pytest.mark.parametrize(
    "content_type", [None, "", "text/plain", "application/jsonx", "multipart/form-data; boundary=x"]
)
def test_wrong_content_type(content_type: str | None) -> None:
    with pytest.raises(ApiError) as error:
        parse_body(OK, content_type)
    assert (error.value.status, error.value.code) == (400, "unsupported_content_type")

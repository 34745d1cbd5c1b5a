"""The shape of every error."""

import pytest

from verdraft.server import errors
from verdraft.server.errors import ApiError


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (errors.missing("prompt"), 400, "missing_required_parameter", "prompt"),
        (errors.invalid_type("n", "an integer", True), 400, "invalid_type", "n"),
        (errors.below_min("n", 0, 1), 400, "integer_below_min_value", "n"),
        (errors.above_max("temperature", 3, 2.0), 400, "decimal_above_max_value", "temperature"),
        (errors.context_length("messages", 9000, 8192), 400, "context_length_exceeded", "messages"),
        (errors.model_not_found("gpt"), 404, "model_not_found", "model"),
        (errors.not_found("/x"), 404, "not_found", None),
        (errors.method_not_allowed("GET", "/x"), 405, "method_not_allowed", None),
        (errors.request_too_large(4194304), 413, "request_too_large", None),
        (errors.internal_error(), 500, "internal_error", None),
        (errors.unavailable("loading", "the model is loading", 1), 503, "loading", None),
    ],
)
def test_body_has_four_keys(error: ApiError, status: int, code: str, param: str | None) -> None:
    assert error.status == status
    inner = error.body()["error"]
    assert set(error.body()) == {"error"}
    assert set(inner) == {"message", "type", "param", "code"}
    assert (inner["code"], inner["param"]) == (code, param)
    assert inner["message"]


def test_context_length_names_both_numbers() -> None:
    message = errors.context_length("prompt", 8195, 8192).message
    assert "8195" in message
    assert "8192" in message


def test_headers() -> None:
    assert errors.rate_limited("x", 2).headers == {"Retry-After": "2"}
    assert errors.queue_full().type == "rate_limit_error"
    assert errors.invalid_api_key().headers == {"WWW-Authenticate": "Bearer"}
    assert errors.unavailable("engine_dead", "the engine has ended").headers == {}


def test_long_and_nested_values_are_not_repeated() -> None:
    assert len(errors.invalid_value("x", errors.shown("y" * 10_000)).message) < 200
    assert errors.shown({"a": 1}) == "an object"
    assert errors.shown(None) == "null"

"""What a client is told when something is wrong: one object of four keys (HTTP contract, section 3).

No HTTP library is known here.
"""

from collections.abc import Mapping


class ApiError(Exception):
    """Any non-2xx answer. `param` is the field as the client wrote it, e.g. `messages[1].content`; None: the body."""

    def __init__(
        self,
        status: int,
        code: str | None,
        message: str,
        param: str | None = None,
        type: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.type = type
        self.headers = dict(headers or {})

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body: exactly message, type, param and code."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


def bad_request(code: str, param: str | None, message: str) -> ApiError:
    """400 with one of the contract's codes; prefer the named helpers below."""
    return ApiError(400, code, message, param)


def invalid_json(message: str, param: str | None = None) -> ApiError:
    return bad_request("invalid_json", param, message)


def unsupported_content_type(content_type: str | None) -> ApiError:
    got = f"got {shown(content_type)}" if content_type else "the header is missing"
    return bad_request("unsupported_content_type", None, f"Content-Type must be application/json; {got}")


def missing(param: str) -> ApiError:
    return bad_request("missing_required_parameter", param, f"'{param}' is required")


def invalid_type(param: str, expected: str, value: object) -> ApiError:
    """`expected` completes "must be ...": "an integer", "a string or an array of strings"."""
    return bad_request("invalid_type", param, f"'{param}' must be {expected}; got {shown(value)}")


def invalid_value(param: str, message: str) -> ApiError:
    return bad_request("invalid_value", param, f"'{param}': {message}")


def below_min(param: str, value: float, minimum: float, exclusive: bool = False) -> ApiError:
    """The code says whether the value was an integer or a decimal field by the type of `minimum`."""
    kind = "integer" if isinstance(minimum, int) else "decimal"
    bound = f"greater than {minimum}" if exclusive else f"at least {minimum}"
    return bad_request(f"{kind}_below_min_value", param, f"'{param}' must be {bound}; got {shown(value)}")


def above_max(param: str, value: float, maximum: float) -> ApiError:
    """The code says whether the value was an integer or a decimal field by the type of `maximum`."""
    kind = "integer" if isinstance(maximum, int) else "decimal"
    return bad_request(f"{kind}_above_max_value", param, f"'{param}' must be at most {maximum}; got {shown(value)}")


def empty_array(param: str) -> ApiError:
    return bad_request("empty_array", param, f"'{param}' must not be an empty array")


def array_too_long(param: str, length: int, maximum: int) -> ApiError:
    message = f"'{param}' may have at most {maximum} entries; got {length}"
    return bad_request("array_above_max_length", param, message)


def empty_string(param: str) -> ApiError:
    return bad_request("empty_string", param, f"'{param}' must not be an empty string")


def string_too_long(param: str, length: int, maximum: int) -> ApiError:
    message = f"'{param}' may have at most {maximum} characters; got {length}"
    return bad_request("string_above_max_length", param, message)


def unsupported_parameter(param: str, message: str | None = None) -> ApiError:
    return bad_request("unsupported_parameter", param, message or f"'{param}' is not supported by this server")


def context_length(param: str, num_tokens: int, max_model_len: int, exact: bool = True) -> ApiError:
    """`param` is `messages` or `prompt`; not `exact`: there are that many tokens or more."""
    found = f"{num_tokens}" if exact else f"at least {num_tokens}"
    message = (
        f"the prompt has {found} tokens, but the context length is {max_model_len} tokens, "
        "of which at least one must be left to generate"
    )
    return bad_request("context_length_exceeded", param, message)


def invalid_api_key() -> ApiError:
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, "invalid_api_key", "a valid key is needed: Authorization: Bearer <key>", headers=headers)


def model_not_found(name: str) -> ApiError:
    return ApiError(404, "model_not_found", f"the model {shown(name)} does not exist on this server", "model")


def not_found(path: str) -> ApiError:
    return ApiError(404, "not_found", f"there is nothing at {shown(path)}")


def method_not_allowed(method: str, path: str) -> ApiError:
    return ApiError(405, "method_not_allowed", f"{shown(method)} is not possible on {shown(path)}")


def request_too_large(max_body_bytes: int) -> ApiError:
    return ApiError(413, "request_too_large", f"the request body may have at most {max_body_bytes} bytes")


def rate_limited(what: str, retry_after: int = 1) -> ApiError:
    """`what` there is too much of; `retry_after` in whole seconds, at least 1."""
    message = f"too many {what}; try again later"
    headers = {"Retry-After": str(retry_after)}
    return ApiError(429, "rate_limit_exceeded", message, type="rate_limit_error", headers=headers)


def queue_full() -> ApiError:
    return rate_limited("requests are waiting")


def internal_error() -> ApiError:
    """Deliberately says nothing about the cause: that belongs in the log."""
    return ApiError(500, "internal_error", "the server failed while working on this request", type="server_error")


def unavailable(code: str, message: str, retry_after: int | None = None) -> ApiError:
    """503; `code` is draining, loading, engine_dead, engine_stuck or request_timeout."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return ApiError(503, code, message, type="server_error", headers=headers)


def shown(value: object, limit: int = 60) -> str:
    """A client's value as it may stand in a message: JSON-like and never long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."

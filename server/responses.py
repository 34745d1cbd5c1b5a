"""JSON and error answers. Knows no route."""

import logging
import traceback
from typing import Any

from starlette.responses import Response

from verdraft.scheduler.errors import ContextTooLong, EngineDead, EngineError, QueueFull
from verdraft.server.errors import ApiError, context_length, internal_error, queue_full, unavailable
from verdraft.server.jsonbody import dump

logger = logging.getLogger("verdraft.server")

RETRY_SECONDS = 5  # while draining or loading


class JsonResponse(Response):
    """As dump() writes it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dump(content)


def error_response(error: ApiError) -> JsonResponse:
    """The four-key object with the error's status and headers."""
    return JsonResponse(error.body(), status_code=error.status, headers=dict(error.headers))


def draining() -> ApiError:
    return unavailable("draining", "the server is shutting down", retry_after=RETRY_SECONDS)


def loading() -> ApiError:
    return unavailable("loading", "the model is still being loaded", retry_after=RETRY_SECONDS)


def request_timeout(seconds: float) -> ApiError:
    return unavailable("request_timeout", f"the request took longer than {seconds:g} seconds")


def engine_dead() -> ApiError:
    return unavailable("engine_dead", "the engine has stopped; the server must be restarted")


def engine_stuck() -> ApiError:
    return unavailable("engine_stuck", "the engine has work but makes no progress")


def engine_failing() -> ApiError:
    return unavailable("engine_stuck", "the engine's last steps have all failed; a request that succeeds ends this")


def refused(error: EngineError, param: str, max_model_len: int) -> ApiError:
    """What a client is told when the engine does not admit a request; `param` is `messages` or `prompt`."""
    match error:
        case QueueFull():
            return queue_full()
        case ContextTooLong():
            if error.prompt_len >= max_model_len:
                return context_length(param, error.prompt_len, max_model_len)
            return _pool_too_small(error, param)
        case EngineDead():
            return engine_dead()
        case _:
            return internal_error()


def _pool_too_small(error: ContextTooLong, param: str) -> ApiError:
    message = (
        f"the prompt has {error.prompt_len} tokens, but this server's KV pool holds prompts of at most "
        f"{error.limit} tokens"
    )
    return ApiError(400, "context_length_exceeded", message, param)


def failed(code: str | None) -> ApiError:
    """The error of a request that the engine ended with finish "error" and this code."""
    nothing_left = ApiError(400, "invalid_value", "the schema and the other parameters leave no token to choose")
    simple = {"engine_dead": engine_dead(), "engine_stuck": engine_stuck(), "invalid_value": nothing_left}
    return simple.get(code or "", internal_error())


def unexpected(error: Exception) -> ApiError:
    """A bug of ours. The log gets the place, not the exception's text: that may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("an unexpected %s:\n%s", type(error).__name__, frames)
    return internal_error()

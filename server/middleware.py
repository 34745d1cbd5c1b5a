"""What every request passes before a route sees it: request id, access log, errors, CORS, the API key.

Plain ASGI throughout, so that a streamed answer is never buffered or copied.
"""

import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verdraft.server.errors import ApiError, invalid_api_key
from verdraft.server.logs import REQUEST_ID
from verdraft.server.responses import error_response, unexpected
from verdraft.server.tracing import NoTracer, Tracer

logger = logging.getLogger("verdraft.server")

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})  # never need a key
ANTHROPIC_PATHS = ("/v1/messages", "/v1/models")  # and what is below them
MAX_REQUEST_ID = 128  # characters
EXPOSED_HEADERS = ("X-Request-Id", "Retry-After", "WWW-Authenticate")


class RequestIds:
    """Outermost: labels the response, and writes the one line that each request gets in the log."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app = app
        self.tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request_id = usable_request_id(Headers(scope=scope).get("x-request-id"))
        state = scope.setdefault("state", {})
        REQUEST_ID.set(request_id)  # for good: every request has a context of its own
        quiet = scope["path"] in OPEN_PATHS
        tracer = NoTracer() if quiet else self.tracer
        span = tracer.begin(scope["method"], scope["path"], Headers(scope=scope), request_id)
        started = time.monotonic()

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
                state["status"] = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, labelled)
        finally:
            _log(scope, time.monotonic() - started, logging.DEBUG if quiet else logging.INFO)
            span.finish(state.get("status"), state.get("outcome"))


def usable_request_id(value: str | None) -> str:
    """The client's label when it is 1 to 128 printable ASCII characters, else a new one."""
    if value and len(value) <= MAX_REQUEST_ID and value.isascii() and value.isprintable():
        return value
    return uuid.uuid4().hex


def _log(scope: Scope, seconds: float, level: int) -> None:
    """Counts only: never a prompt, an output, a query string or a header."""
    state = scope["state"]
    fields: dict[str, Any] = {"method": scope["method"], "path": scope["path"][:80], "status": state.get("status")}
    fields["seconds"] = round(seconds, 4)
    if "outcome" in state:
        fields |= state["outcome"].fields()
    logger.log(level, "no answer" if fields["status"] is None else "answered", extra={"fields": fields})


class Errors:
    """Turns what nobody caught into the error object; after the first byte the connection is cut instead."""

    def __init__(self, app: ASGIApp, count: Callable[[ApiError], None]) -> None:
        self.app = app
        self.count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception as error:
            answer = error if isinstance(error, ApiError) else unexpected(error)
            if started:
                return
            self.count(answer)
            await error_response(answer)(scope, receive, send)


class ApiKeys:
    """Every path but the open ones needs `Authorization: Bearer <key>`; OPTIONS never does.

    Anthropic's clients say `x-api-key: <key>` instead, which counts on the paths that they ask.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self.digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS" and not self._allowed(scope):
            raise invalid_api_key()
        await self.app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = [key.strip()] if scheme.lower() == "bearer" else []
        if scope["path"].startswith(ANTHROPIC_PATHS):
            given.append(headers.get("x-api-key", ""))
        return sum(self._known(_digest(each.encode("latin-1"))) for each in given) > 0

    def _known(self, digest: bytes) -> bool:
        """In a time that says nothing about the keys: all are compared, and by digests of one length."""
        return sum(hmac.compare_digest(digest, each) for each in self.digests) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def wrap(app: ASGIApp, api_keys: Sequence[str], count: Callable[[ApiError], None], tracer: Tracer) -> ASGIApp:
    """The whole stack around `app`, innermost first. Without keys everybody may ask."""
    wrapped: Any = ApiKeys(app, api_keys) if api_keys else app
    wrapped = Errors(wrapped, count)
    wrapped = CORSMiddleware(
        wrapped,
        allow_origins=["*"],
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=EXPOSED_HEADERS,
    )
    return RequestIds(wrapped, tracer)

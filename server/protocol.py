"""HTTP parsing as uvicorn does it, with bounds on what a client may send or leave undone. Knows no routes."""

import asyncio
from http import HTTPStatus

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from verdraft.server.errors import ApiError, invalid_json, rate_limited, unavailable
from verdraft.server.middleware import usable_request_id

MAX_HEAD_BYTES = 64 << 10  # request line and headers, or trailers, of one request
STALL_SECONDS = 30.0  # how often a connection's progress is looked at
MIN_BYTES = 32 << 10  # of an unfinished request that must come in that time
HALF_CLOSED_SECONDS = 0.5  # what is answered so soon still reaches a client that has only stopped sending


class HeadTooLong(Exception):
    """Raised inside a parser callback, where it ends the connection as any other malformed request does."""


class Seats:
    """How many connections may be open. `idle` are those without a complete head, the longest idle first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.idle: dict[Protocol, None] = {}


class Protocol(HttpToolsProtocol):
    """uvicorn's, but what is not HTTP at all gets the error object too, and so does a head without end.

    The body has its own bound (max_body_bytes). Everything else is kept in memory before any check of ours runs:
    complete headers are counted as they come, and what the parser swallows without a callback (an unfinished header, a
    chunk extension) is counted by the read, so one read more than the bound may pass.

    A look at the connection every STALL_SECONDS finds who sends a request by drips, and who takes nothing of an answer.
    Between requests only uvicorn's keep-alive clock runs.

    One connection more than there are seats takes that of the longest idle one; when none is idle it is refused.
    """

    seats: Seats  # of limited()
    _head_bytes = 0  # of this request, in complete headers and the URL
    _silent_bytes = 0  # read since the parser last had anything to say
    _arriving = False  # a request has begun and is not complete
    _in_head = False  # nor is its head
    _dripping: int | None = None  # bytes of it since the last look; None: it was not arriving, or was told to wait
    _untaken = 0  # bytes that waited for a blocked client at the last look
    _look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.seats.idle[self] = None
        if len(self.connections) > self.seats.limit:
            self._make_room()
        self._look = self.loop.call_later(STALL_SECONDS, self._check_progress)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look:
            self._look.cancel()
        self.seats.idle.pop(self, None)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has left and one that only has no more to say look the same: both are given up soon."""
        complete = self._answering() and not self._arriving
        if complete:
            self.loop.call_later(HALF_CLOSED_SECONDS, self.transport.close)
        return complete  # False: close now

    def data_received(self, data: bytes) -> None:
        self._silent_bytes += len(data)
        if self._silent_bytes - len(data) > MAX_HEAD_BYTES:
            self.send_400_response("")
            return
        if self._dripping is not None:
            self._dripping += len(data)
        super().data_received(data)
        self._await_request()

    def on_message_begin(self) -> None:
        self._arriving = self._in_head = True
        self._head_bytes = self._silent_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self.seats.idle.pop(self, None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._arriving = False
        self._dripping = None
        self._silent_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._answering() and not self.transport.is_closing():
            self.seats.idle[self] = None

    def pause_writing(self) -> None:
        self._untaken = 0
        super().pause_writing()

    def _count(self, size: int) -> None:
        self._silent_bytes = 0
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLong

    def _make_room(self) -> None:
        idle = next(iter(self.seats.idle))
        del self.seats.idle[idle]
        if idle is self or idle._arriving:
            idle._end(rate_limited("connections are open"))
        else:  # what came unasked would be taken for the answer to the next request
            idle.transport.close()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        """uvicorn starts its keep-alive clock only behind an answer, and lets an empty line stop it."""
        if not self._arriving and not self._answering() and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _check_progress(self) -> None:
        """Nothing but a whole interval without progress counts, so a client has up to twice STALL_SECONDS."""
        untaken = self._blocked_bytes()
        if untaken and self._untaken and untaken >= self._untaken:
            self.transport.abort()  # close() would wait for the client
        elif self._dripping is not None and self._dripping < MIN_BYTES and not self.transport.is_closing():
            self._end(unavailable("request_timeout", "the request came too slowly"))
        self._untaken = untaken
        self._dripping = 0 if self._arriving and not self.flow.read_paused else None
        self._look = self.loop.call_later(STALL_SECONDS, self._check_progress)

    def _blocked_bytes(self) -> int:
        """What waits for the client while nothing can be added to it."""
        blocked = self.flow.write_paused or self.transport.is_closing()
        return self.transport.get_write_buffer_size() if blocked else 0

    def send_400_response(self, msg: str) -> None:
        self._end(invalid_json("the request is not valid HTTP, or its head is too long"))

    def _end(self, error: ApiError) -> None:
        """Answer the request that is arriving with `error`, unless another answer is on its way, and close."""
        in_body = self._arriving and not self._in_head
        answered = self.cycle.response_started if in_body else self._answering()
        if not answered and not self.pipeline:
            self.transport.write(_whole_answer(error))
        self.transport.close()


def _whole_answer(error: ApiError) -> bytes:
    body = orjson.dumps(error.body())
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "x-request-id": usable_request_id(None),
        **error.headers,
    }
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        *(": ".join(pair) for pair in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def limited(max_connections: int) -> type[Protocol]:
    """The protocol of one server, with that many seats."""

    class Limited(Protocol):
        seats = Seats(max_connections)

    return Limited

"""HTTP parsing as uvicorn does it, with bounds on what a client may send outside the body. Knows no routes."""

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from verdraft.server.errors import invalid_json
from verdraft.server.middleware import usable_request_id

MAX_HEAD_BYTES = 64 << 10  # request line and headers, or trailers, of one request


class HeadTooLong(Exception):
    """Raised inside a parser callback, where it ends the connection as any other malformed request does."""


class Protocol(HttpToolsProtocol):
    """uvicorn's, but what is not HTTP at all gets the error object too, and so does a head without end.

    The body has its own bound (max_body_bytes). Everything else is kept in memory before any check of ours runs:
    complete headers are counted as they come, and what the parser swallows without a callback (an unfinished header, a
    chunk extension) is counted by the read, so one read more than the bound may pass.
    """

    _head_bytes = 0  # of this request, in complete headers and the URL
    _silent_bytes = 0  # read since the parser last had anything to say

    def data_received(self, data: bytes) -> None:
        self._silent_bytes += len(data)
        if self._silent_bytes - len(data) > MAX_HEAD_BYTES:
            self.send_400_response("")
            return
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._head_bytes = self._silent_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._silent_bytes = 0
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._silent_bytes = 0
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLong

    def send_400_response(self, msg: str) -> None:
        body = orjson.dumps(invalid_json("the request is not valid HTTP, or its head is too long").body())
        head = (
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"x-request-id: %s\r\ncontent-length: %d\r\n\r\n" % (usable_request_id(None).encode(), len(body))
        )
        self.transport.write(head + body)
        self.transport.close()

"""Server-sent events on a plain ASGI connection: framing, headers and the slow reader rule. Knows no chunk's shape."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.types import Send

from verdraft.server.jsonbody import dump

PATIENCE_SECONDS = 30.0  # a client that takes nothing for this long is given up
DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class SlowReader(Exception):
    """The client has taken nothing for PATIENCE_SECONDS, or is too far behind."""


def frame(payloads: Iterable[Any]) -> bytes:
    """One `data:` event for each payload."""
    return b"".join(b"data: " + dump(payload) + b"\n\n" for payload in payloads)


def named_frame(payloads: Iterable[Any]) -> bytes:
    """The same with an `event:` line before each, which says the payload's "type" once more."""
    return b"".join(b"event: " + payload["type"].encode() + b"\n" + frame([payload]) for payload in payloads)


@dataclass(frozen=True, slots=True)
class Wire:
    """How payloads are framed, and what comes behind the last one."""

    frame: Callable[[Iterable[Any]], bytes]
    end: bytes


DATA, NAMED = Wire(frame, DONE), Wire(named_frame, b"")


class EventStream:
    """One answer. open(), then write() as often as there is something, then end()."""

    def __init__(self, send: Send, patience: float = PATIENCE_SECONDS) -> None:
        self._send = send
        self._patience = patience
        self._given_up = False
        self.opened = False

    async def open(self) -> None:
        """Status 200 and the headers; from here on errors are events."""
        self.opened = True
        await self._send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})

    async def write(self, frames: bytes) -> None:
        """Waits while the connection's own small buffer is full. Raises SlowReader."""
        await self._body(frames, more=True)

    async def end(self, frames: bytes) -> None:
        """`frames`, then the end of the body. Raises SlowReader."""
        await self._body(frames, more=False)

    async def _body(self, frames: bytes, more: bool) -> None:
        """What asyncio.timeout() does, in a third of its time: this runs for every token."""
        task = asyncio.current_task()
        assert task is not None
        timer = asyncio.get_running_loop().call_later(self._patience, self._give_up, task)
        try:
            await self._send({"type": "http.response.body", "body": frames, "more_body": more})
        except asyncio.CancelledError:
            if not self._given_up or task.uncancel():  # somebody else cancels us
                raise
            raise SlowReader from None
        finally:
            timer.cancel()

    def _give_up(self, task: asyncio.Task[Any]) -> None:
        self._given_up = True
        task.cancel()

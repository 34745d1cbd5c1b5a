"""The client's side of one HTTP exchange: reading its body within the limit, noticing that it has gone."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from verdraft.server.errors import request_too_large


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body. Raises ApiError 413 as soon as it is known to be too long, or ClientGone."""
    declared = Headers(scope=scope).get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise request_too_large(max_bytes)
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > max_bytes:
            raise request_too_large(max_bytes)
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; when the client goes away first, cancel it and raise ClientGone. The body must have been read."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for future in (task, watcher):
            future.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

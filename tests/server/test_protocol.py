"""A connection's bounds: what a client may send before, between and after bodies."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from verdraft.server.protocol import MAX_HEAD_BYTES, Protocol

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
PIECE = b"a" * 4096


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the number of bytes in the body."""
    body = await Request(scope, receive).body()
    await PlainTextResponse(str(len(body)))(scope, receive, send)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    config = uvicorn.Config(echo, http=Protocol, port=0, lifespan="off", log_config=None)
    config.load()
    state = uvicorn.server.ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Protocol(config, state, {}), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def answer(port: int, pieces: Iterable[bytes]) -> bytes:
    """What comes back until the server is silent or has closed; nothing when a reset overtakes the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(30):  # a server without bounds waits for ever
            return await reader.readuntil(b"\r\n\r\n")
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


def endless(first: bytes, more: bytes) -> Iterable[bytes]:
    yield first
    for _ in range(100 * MAX_HEAD_BYTES // len(more)):
        yield more


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (HEAD, b"X: " + PIECE + b"\r\n"),
        (HEAD + b"X: ", PIECE),
        (HEAD, PIECE),
        (b"GET /", PIECE),
        (CHUNKED + b"1", b";x=" + PIECE),
        (CHUNKED + b"0\r\n", b"X: " + PIECE + b"\r\n"),
        (CHUNKED + b"0\r\nX: ", PIECE),
    ],
    ids=["headers", "value", "name", "url", "extension", "trailers", "trailer"],
)
async def test_what_never_ends_is_cut(port: int, first: bytes, more: bytes) -> None:
    sent = 0

    def counted() -> Iterable[bytes]:
        nonlocal sent
        for piece in endless(first, more):
            sent += len(piece)
            yield piece

    got = await answer(port, counted())
    assert got == b"" or got.startswith(b"HTTP/1.1 400 ")
    assert sent < 100 * MAX_HEAD_BYTES


async def test_a_refusal_can_be_read(port: int) -> None:
    got = await answer(port, [HEAD + b"X: " + b"a" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n"])
    assert got.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in got


@pytest.mark.parametrize("size", [0, 1, 3 * MAX_HEAD_BYTES])
async def test_long_bodies_and_heads_below_the_bound_pass(port: int, size: int) -> None:
    head = HEAD + b"X: " + b"a" * (MAX_HEAD_BYTES - 1000) + b"\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % size + b"b" * size
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(3):  # one connection: the count starts again with every request
        writer.write(whole)
        got = await reader.readuntil(b"\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 200 ")
        assert await reader.readexactly(len(str(size))) == str(size).encode()
    writer.transport.abort()


async def test_many_small_chunks_pass(port: int) -> None:
    chunks = b"1\r\nz\r\n" * MAX_HEAD_BYTES
    got = await answer(port, [CHUNKED, chunks, b"0\r\n\r\n"])
    assert got.startswith(b"HTTP/1.1 200 ")

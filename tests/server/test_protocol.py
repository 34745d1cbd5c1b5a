"""A connection's bounds: what a client may send before, between and after bodies."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from verdraft.server import protocol
from verdraft.server.protocol import MAX_HEAD_BYTES, limited

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
PIECE = b"a" * 4096
MAX_CONNECTIONS = 4


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the number of bytes in the body; /slow takes a second for it, /large sends 32 MiB."""
    body = await Request(scope, receive).body()
    if scope["path"] == "/slow":
        await asyncio.sleep(1)
    answer = b"a" * (32 << 20) if scope["path"] == "/large" else str(len(body))
    await PlainTextResponse(answer)(scope, receive, send)


@dataclass
class Listener:
    """A server on a free port and the connections it has."""

    port: int
    connections: set[Any]
    config: uvicorn.Config

    async def emptied(self) -> bool:
        """Whether every connection is gone within a few seconds, without the help of its client."""
        for _ in range(100):
            if not self.connections:
                return True
            await asyncio.sleep(0.05)
        return False


@pytest.fixture
def listener() -> Iterator[Listener]:
    """In a thread, on the event loop that the command uses."""
    kind = limited(MAX_CONNECTIONS)
    config = uvicorn.Config(echo, http=kind, lifespan="off", log_config=None, timeout_keep_alive=90)
    config.load()
    state = uvicorn.server.ServerState()
    loop = uvloop.new_event_loop()
    serving = loop.create_server(lambda: kind(config, state, {}, loop), "127.0.0.1", 0)
    server = loop.run_until_complete(serving)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield Listener(server.sockets[0].getsockname()[1], state.connections, config)
    asyncio.run_coroutine_threadsafe(_close(server, state), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _close(server: asyncio.Server, state: Any) -> None:
    server.close()
    while state.connections or state.tasks:
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.sleep(0.01)


@pytest.fixture
def port(listener: Listener) -> int:
    return listener.port


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look every 0.2 s; an unfinished request must have brought 10 bytes by then."""
    monkeypatch.setattr(protocol, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(protocol, "MIN_BYTES", 10)


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


@asynccontextmanager
async def connected(
    port: int, limit: int = 1 << 16
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)


WITH_BODY = HEAD + b"Content-Length: 100\r\n\r\n"
PLAIN = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "begun",
    [b"G", HEAD, HEAD + b"X: y", WITH_BODY, WITH_BODY + b"half", CHUNKED + b"5\r\nab", PLAIN % b"" + HEAD],
    ids=["method", "head", "header", "no body", "body", "chunk", "second request"],
)
async def test_a_request_that_stays_unfinished_is_answered_and_cut(listener: Listener, begun: bytes) -> None:
    async with connected(listener.port) as (reader, writer):
        writer.write(begun)
        async with asyncio.timeout(5):
            got = await reader.read()
        assert got.rpartition(b"HTTP/1.1 ")[2].startswith(b"503 ")
        assert b'"code":"request_timeout"' in got
        assert await listener.emptied()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("begun", [HEAD + b"X: ", WITH_BODY], ids=["head", "body"])
async def test_drips_do_not_help(listener: Listener, begun: bytes) -> None:
    async with connected(listener.port) as (_, writer):
        writer.write(begun + b"a")
        await asyncio.sleep(0.1)
        assert listener.connections
        async with asyncio.timeout(5):
            while listener.connections:
                writer.write(b"a")
                await asyncio.sleep(0.05)


@pytest.mark.usefixtures("impatient")
async def test_slow_but_steady_requests_pass(port: int) -> None:
    async with connected(port) as (reader, writer):
        size = 200
        for piece in [
            HEAD,
            b"X: ",
            *[b"abcdef"] * 20,
            b"\r\nContent-Length: %d\r\n\r\n" % size,
            *[b"12345"] * (size // 5),
        ]:
            writer.write(piece)
            await asyncio.sleep(0.02)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert await reader.readexactly(3) == b"200"


@pytest.mark.usefixtures("impatient")
async def test_a_slow_answer_and_an_idle_connection_are_left_alone(port: int) -> None:
    async with connected(port) as (reader, writer):
        for _ in range(2):
            writer.write(PLAIN % b"slow")
            assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200 ")
            await asyncio.sleep(0.5)


@pytest.mark.parametrize("sent", [b"", b"\r\n", PLAIN % b""], ids=["nothing", "empty line", "one request"])
async def test_connections_without_a_request_are_closed(listener: Listener, sent: bytes) -> None:
    listener.config.timeout_keep_alive = 1
    async with connected(listener.port) as (reader, writer):
        writer.write(sent)
        await asyncio.sleep(0.5)
        assert not reader.at_eof()
        async with asyncio.timeout(5):
            await reader.read()
        assert await listener.emptied()


async def test_a_new_connection_takes_the_seat_of_the_longest_idle_one(listener: Listener) -> None:
    """Idle ones once could keep everybody else out, or use up the process's files."""
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(connected(listener.port)) for _ in range(MAX_CONNECTIONS)]
        while len(listener.connections) < MAX_CONNECTIONS:  # noqa: ASYNC110  # accepted, in the order of the list
            await asyncio.sleep(0.01)
        for number in (1, 0):  # an answer makes a connection the youngest; the other two never ask
            streams[number][1].write(PLAIN % b"")
            await streams[number][0].readuntil(b"\r\n\r\n0")
        for gone in (2, 3, 1):
            reader, writer = await stack.enter_async_context(connected(listener.port))
            writer.write(PLAIN % b"slow")
            async with asyncio.timeout(5):
                assert await streams[gone][0].read() == b""
            streams.append((reader, writer))
        for reader, _ in streams[MAX_CONNECTIONS:]:
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        assert len(listener.connections) <= MAX_CONNECTIONS


async def test_a_connection_too_many_is_refused_when_all_are_busy(listener: Listener) -> None:
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(connected(listener.port)) for _ in range(MAX_CONNECTIONS)]
        for _, writer in streams:
            writer.write(PLAIN % b"slow")
        await asyncio.sleep(0.3)
        reader, _ = await stack.enter_async_context(connected(listener.port))
        async with asyncio.timeout(5):
            refusal = await reader.read()
        assert refusal.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        assert b"Retry-After: 1\r\n" in refusal
        for reader, _ in streams:
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.usefixtures("impatient")
async def test_a_client_that_takes_nothing_is_cut(listener: Listener) -> None:
    async with connected(listener.port, limit=1024) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(PLAIN % b"large")
        await asyncio.sleep(0.1)
        assert listener.connections
        assert await listener.emptied()


@pytest.mark.usefixtures("impatient")
async def test_a_client_that_takes_little_by_little_is_not(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STALL_SECONDS", 0.5)  # a busy machine may leave this client waiting for a while
    async with connected(listener.port, limit=256 << 10) as (reader, writer):
        writer.write(PLAIN % b"large")
        for _ in range(15):  # three looks, during which the answer does not fit into any buffer
            await reader.readexactly(1 << 20)
            await asyncio.sleep(0.1)
        assert listener.connections
        await reader.readexactly(15 << 20)


async def test_a_client_that_has_said_all_still_gets_a_quick_answer(listener: Listener) -> None:
    async with connected(listener.port) as (reader, writer):
        writer.write(PLAIN % b"")
        writer.write_eof()
        async with asyncio.timeout(5):
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        assert await listener.emptied()


@pytest.mark.parametrize("sent", [PLAIN % b"slow", WITH_BODY], ids=["slow answer", "half a request"])
async def test_a_client_that_has_said_all_is_soon_taken_for_gone(listener: Listener, sent: bytes) -> None:
    async with connected(listener.port) as (reader, writer):
        writer.write(sent)
        writer.write_eof()
        started = asyncio.get_running_loop().time()
        assert await reader.read() == b""
        assert asyncio.get_running_loop().time() - started < 0.9

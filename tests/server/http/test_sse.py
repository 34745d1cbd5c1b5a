"""Framing, and clients that do not read."""

import asyncio
from typing import Any

import pytest

from verdraft.scheduler.async_engine import SequenceStream
from verdraft.scheduler.outputs import TokenLogprobs, TokenSlice
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Request
from verdraft.server.errors import ApiError, internal_error
from verdraft.server.generation import MAX_BACKLOG, Generation
from verdraft.server.sse import DATA, NAMED, EventStream, SlowReader, frame


class Silent:
    """An observer that wants nothing."""

    def tokens_after(self, seconds: float, num_tokens: int) -> None:
        pass


def submitted(generation: Generation, count: int = 1) -> list[SequenceStream]:
    requests = [Request(id="r", prompt=[1], params=SamplingParams()) for _ in range(count)]
    streams = [SequenceStream(request, lambda _: None) for request in requests]
    generation.submit(lambda _: streams, requests)
    return streams


def test_frames() -> None:
    assert frame([{"a": "\u00e9\n"}, 1]) == b'data: {"a":"\xc3\xa9\\n"}\n\ndata: 1\n\n'
    assert frame([]) == b""
    assert NAMED.frame([{"type": "ping"}]) + NAMED.end == b'event: ping\ndata: {"type":"ping"}\n\n'


async def test_a_whole_answer() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    out = EventStream(send)
    assert not out.opened
    await out.open()
    await out.write(b"x")
    await out.end(DATA.frame([1]) + DATA.end)
    assert dict(sent[0]["headers"])[b"x-accel-buffering"] == b"no"
    assert [m["body"] for m in sent[1:]] == [b"x", b"data: 1\n\ndata: [DONE]\n\n"]
    assert [m["more_body"] for m in sent[1:]] == [True, False]


async def test_a_client_that_takes_nothing_is_given_up() -> None:
    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    out = EventStream(send, patience=0.01)
    await out.open()
    with pytest.raises(SlowReader):
        await out.write(b"x")


async def test_what_waits_for_a_slow_reader_is_bounded() -> None:
    generation = Generation("r", Silent(), bounded=True)
    (stream,) = submitted(generation)
    large = TokenSlice((5,), (TokenLogprobs(-1.0, tuple((i, -1.0) for i in range(1000))),))
    for _ in range(2 * MAX_BACKLOG // 60_000):
        stream.deliver(large)
    await asyncio.sleep(0.01)
    with pytest.raises(SlowReader):
        await generation.next()
    await generation.close()


async def test_slices_that_are_ready_come_together() -> None:
    generation = Generation("r", Silent())
    first, second = submitted(generation, 2)
    for token in (1, 2):
        first.deliver(TokenSlice((token,)))
    second.deliver(TokenSlice((3,), finish="length"))
    await asyncio.sleep(0.01)
    pieces = await generation.next()
    assert sorted((p.index, p.slice.tokens) for p in pieces) == [(0, (1,)), (0, (2,)), (1, (3,))]
    assert not generation.done
    first.deliver(TokenSlice(finish="stop"))
    await generation.next()
    assert generation.done
    await generation.close()


async def test_a_failure_before_submission_is_raised_there() -> None:
    generation = Generation("r", Silent())
    generation.fail(internal_error())
    with pytest.raises(ApiError):
        submitted(generation)
    await generation.close()
    assert not generation.abort()

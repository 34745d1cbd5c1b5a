"""The bridge: streams end, closing one aborts it, bounds hold, a failing or frozen engine is reported."""

import asyncio
import time

import pytest

from verdraft.scheduler import async_engine
from verdraft.scheduler.async_engine import AsyncEngine
from verdraft.scheduler.errors import ContextTooLong, EngineDead, QueueFull
from verdraft.scheduler.request import Fault
from verdraft.scheduler.runner import Runner

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
async def start(make_engine):
    """Start async engines; all are closed afterwards."""
    started = []

    async def build(**fields):
        bridge = AsyncEngine(make_engine(**fields))
        await bridge.start()
        started.append(bridge)
        return bridge

    yield build
    for bridge in started:
        await bridge.close()


async def settled(bridge):
    """Wait until the engine holds nothing."""
    async with asyncio.timeout(10):
        while bridge.engine.has_work or bridge.counters().kv_blocks_used:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_choices_stream_side_by_side(start, make_request):
    bridge = await start()
    requests = [make_request(f"{i}", PROMPT, choice=i, max_tokens=10, ignore_eos=True) for i in range(3)]
    streams = bridge.submit(requests)
    slices = await asyncio.gather(*[_collect(stream) for stream in streams])
    tokens = [[t for piece in each for t in piece.tokens] for each in slices]
    assert [len(each) for each in tokens] == [10, 10, 10]
    assert tokens[0] == tokens[1] == tokens[2]
    assert all(each[-1].finish == "length" for each in slices)


async def _collect(stream):
    return [piece async for piece in stream]


async def test_closing_a_stream_aborts_its_sequence(start, make_request):
    bridge = await start()
    (stream,) = bridge.submit([make_request("a", PROMPT, max_tokens=200, ignore_eos=True)])
    async with stream:
        await anext(stream)
    await settled(bridge)
    assert bridge.counters().aborted == 1
    await bridge.reset_caches()  # a turn of the thread: what it was doing is done
    bridge.engine.check_integrity()


async def test_abort_ends_the_stream_with_a_reason(start, make_request):
    bridge = await start()
    (stream,) = bridge.submit([make_request("a", PROMPT, max_tokens=200, ignore_eos=True)])
    await anext(stream)
    stream.abort()
    assert (await _collect(stream))[-1].finish == "abort"
    stream.abort()  # finished: nothing to do
    assert bridge.counters().aborted == 1


async def test_the_queue_counts_submissions_not_choices(start, make_request):
    bridge = await start(max_num_seqs=1, max_queue=1)
    frozen = make_request("busy", PROMPT, max_tokens=2, fault=Fault("freeze", seconds=0.5))
    streams = bridge.submit([frozen])
    while not bridge.counters().num_running:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    streams += bridge.submit([make_request(f"w{i}", PROMPT, choice=i, max_tokens=2) for i in range(3)])
    with pytest.raises(QueueFull):
        bridge.submit([make_request("x", PROMPT, max_tokens=2)])
    for slices in await asyncio.gather(*[_collect(stream) for stream in streams]):
        assert slices[-1].finish in ("stop", "length")


async def test_a_prompt_that_cannot_fit_leaves_nothing_behind(start, make_request):
    bridge = await start()
    with pytest.raises(ContextTooLong):
        bridge.submit([make_request("ok", PROMPT), make_request("big", [1] * 300)])
    assert not bridge.engine.has_work
    assert bridge.health() == "ok"


async def test_a_frozen_engine_is_stuck_until_it_moves_again(start, make_request, monkeypatch):
    monkeypatch.setattr(async_engine, "STUCK_SECONDS", 0.05)
    bridge = await start()
    (stream,) = bridge.submit([make_request("a", PROMPT, max_tokens=2, fault=Fault("freeze", seconds=0.4))])
    await asyncio.sleep(0.2)
    assert bridge.health() == "stuck"
    await _collect(stream)
    assert bridge.health() == "ok"


async def test_an_engine_that_repeats_a_failed_step_is_not_stuck(start, make_request, monkeypatch):
    """Sequence by sequence that took longer than a step may, and /health spoke of no progress meanwhile."""
    bridge = await start(max_num_seqs=8)
    bridge.engine._runner.model.before_forward = lambda: time.sleep(0.1)
    faulty = make_request("x", PROMPT, max_tokens=2, fault=Fault("raise"))
    good = [make_request(f"{i}", [i + 5, 6, 7], max_tokens=2, ignore_eos=True) for i in range(7)]
    monkeypatch.setattr(async_engine, "STUCK_SECONDS", 0.5)
    streams = [stream for request in (*good, faulty) for stream in bridge.submit([request])]
    found = set()
    ended = asyncio.gather(*[_collect(stream) for stream in streams])
    while not ended.done():
        found.add(bridge.health())
        await asyncio.sleep(0.001)
    assert [slices[-1].finish for slices in ended.result()] == ["length"] * 7 + ["error"]
    assert found == {"ok"}


async def test_an_error_outside_any_sequence_fails_the_step_and_no_more(start, make_request):
    bridge = await start()
    schedule = bridge.engine.scheduler.schedule
    bridge.engine.scheduler.schedule = lambda: (bridge.engine.scheduler.running and 1 / 0) or schedule()
    (stream,) = bridge.submit([make_request("a", PROMPT, max_tokens=50, ignore_eos=True)])
    slices = await _collect(stream)
    assert (slices[-1].finish, slices[-1].error_code) == ("error", "internal_error")
    bridge.engine.scheduler.schedule = schedule
    (stream,) = bridge.submit([make_request("b", PROMPT, max_tokens=3, ignore_eos=True)])
    assert (await _collect(stream))[-1].finish == "length"


@pytest.mark.parametrize("place", ["pass", "schedule"])
async def test_an_engine_whose_every_step_fails_says_so_until_one_succeeds(start, make_request, monkeypatch, place):
    """Such a server used to call itself healthy; one that failed before any sequence ran never ended a request."""
    bridge = await start()
    failing = {"pass": (Runner, "start"), "schedule": (bridge.engine.scheduler, "schedule")}

    async def ask():
        (stream,) = bridge.submit([make_request("a", PROMPT, max_tokens=3, ignore_eos=True)])
        return (await _collect(stream))[-1].error_code

    with monkeypatch.context() as broken:
        broken.setattr(*failing[place], lambda *_: 1 / 0)
        found = []
        for _ in range(async_engine.FAILED_STEPS):
            found.append(bridge.health())
            assert await ask() == "internal_error"
        assert set(found) == {"ok"}
        assert bridge.health() == "failing"
    assert await ask() is None
    assert bridge.health() == "ok"
    bridge.engine.check_integrity()


async def test_what_cannot_be_added_fails_alone(start, make_request):
    """An error there once ended the engine's thread, and with it every other request."""
    bridge = await start()
    (neighbour,) = bridge.submit([make_request("a", PROMPT, max_tokens=40, ignore_eos=True)])
    add = bridge.engine.scheduler.add
    bridge.engine.scheduler.add = lambda seq: 1 / 0 if seq.request.choice == 1 else add(seq)
    streams = bridge.submit([make_request(f"{i}", PROMPT, choice=i, max_tokens=5) for i in range(3)])
    slices = await asyncio.gather(*[_collect(stream) for stream in streams])
    assert [(each[-1].finish, each[-1].error_code) for each in slices] == [("error", "internal_error")] * 3
    assert (await _collect(neighbour))[-1].finish == "length"
    assert bridge.health() == "ok"
    await settled(bridge)
    bridge.engine.check_integrity()


async def test_a_dead_engine_refuses_and_ends_its_streams(start, make_request):
    bridge = await start()
    (stream,) = bridge.submit([make_request("a", PROMPT, max_tokens=200, ignore_eos=True)])
    await anext(stream)
    bridge.engine.step = bridge.engine.fail_all = lambda: 1 / 0
    assert (await _collect(stream))[-1].error_code == "engine_dead"
    assert bridge.health() == "dead"
    with pytest.raises(EngineDead):
        bridge.submit([make_request("b", PROMPT)])


async def test_nobody_waits_for_an_engine_that_dies_meanwhile(start, make_request):
    """Who had been found to fit, but was not known yet when the thread ended, once waited for ever."""
    bridge = await start()

    def die(prompt_len):
        bridge._commands.put(lambda: 1 / 0)
        bridge._thread.join()

    bridge.engine.check_fits = die
    (stream,) = bridge.submit([make_request("a", PROMPT)])
    async with asyncio.timeout(10):
        assert (await _collect(stream))[-1].error_code == "engine_dead"


async def test_a_reset_that_finds_the_engine_stopped_says_so(start, make_request):
    """One that came while the server stopped once waited for ever, and got an answer of plain text."""
    bridge = await start()
    bridge.submit([make_request("a", PROMPT, max_tokens=2, fault=Fault("freeze", seconds=0.3))])
    closing = asyncio.create_task(bridge.close())
    await asyncio.sleep(0)
    for _ in range(2):  # while the thread ends, and after
        with pytest.raises(EngineDead):
            async with asyncio.timeout(10):
                await bridge.reset_caches()
        await closing


async def test_caches_are_reset_between_steps(start, make_request):
    bridge = await start()
    cached = []
    for _ in range(3):
        (stream,) = bridge.submit([make_request("a", PROMPT, max_tokens=4, ignore_eos=True)])
        cached.append((await _collect(stream))[-1].summary.cached_tokens)
        if len(cached) == 2:
            await bridge.reset_caches()
    assert cached == [0, 4, 0]

"""The bridge between asyncio and the engine's own thread: submissions go in, slices of tokens come out.

The thread owns the engine; the event loop only passes messages. A stream that is closed aborts its sequence.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, Self

from verdraft.scheduler.counters import EngineCounters
from verdraft.scheduler.engine import Engine, Output
from verdraft.scheduler.errors import EngineDead, QueueFull
from verdraft.scheduler.outputs import TokenSlice
from verdraft.scheduler.request import Group, Request

logger = logging.getLogger("verdraft.engine")

STUCK_SECONDS = 10.0  # work but no step for this long: the engine is stuck (HTTP contract, section 2)
FAILED_STEPS = 8  # in a row, with nothing that came out well in between: no later one is expected to do better

Command = Callable[[], list[Output]]
Health = Literal["ok", "dead", "stuck", "failing"]


class SequenceStream:
    """Async iterator over one sequence's slices; ends after the one with `finish`. Used on one event loop only.

    Who needs no turn of the loop for each slice gives a function to listen() instead.
    """

    def __init__(self, request: Request, abort: Callable[[Request], None]) -> None:
        self.request = request
        self._abort = abort
        self._slices: deque[TokenSlice] = deque()
        self._arrived = asyncio.Event()
        self.finished = False  # the last slice has arrived, though perhaps not been read
        self._exhausted = False
        self._take: Callable[[TokenSlice], None] = self._keep

    def listen(self, listener: Callable[[TokenSlice], None]) -> None:
        """Call `listener` with every slice as it arrives; before the first, and then nothing is left to iterate."""
        self._take = listener

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenSlice:
        if self._exhausted:
            raise StopAsyncIteration
        while not self._slices:
            self._arrived.clear()
            await self._arrived.wait()
        piece = self._slices.popleft()
        self._exhausted = piece.finish is not None
        return piece

    def deliver(self, piece: TokenSlice) -> None:
        """Called on the event loop for every slice."""
        self.finished = self.finished or piece.finish is not None
        self._take(piece)

    def _keep(self, piece: TokenSlice) -> None:
        self._slices.append(piece)
        self._arrived.set()

    def abort(self) -> None:
        """End the sequence; what it has so far stays readable and the last slice says "abort"."""
        if not self.finished:
            self._abort(self.request)

    async def aclose(self) -> None:
        """The reader has gone: abort, and never wait for anything."""
        self.abort()
        self._exhausted = True
        self._take = self._keep
        self._slices.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncEngine:
    """Runs an engine in a thread of its own. Every method belongs to the event loop that called start()."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="verdraft-engine", daemon=True)
        self._streams: dict[Request, SequenceStream] = {}
        self._groups: dict[Group, int] = {}
        self._resets: set[asyncio.Future[bool]] = set()  # that wait for the thread
        self._closed = threading.Event()
        self._ended = False
        self._progress = time.monotonic()
        self._num_failed = 0  # steps since the last that brought any sequence on
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Abort what is left and end the thread; waits for the step that runs."""
        for stream in list(self._streams.values()):
            stream.abort()
        self._closed.set()
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    # ---- the event loop's side

    def submit(self, requests: Sequence[Request]) -> list[SequenceStream]:
        """Queue the sequences of one submission, ordered by prompt, then choice; all or none.

        Raises QueueFull, ContextTooLong or EngineDead.
        """
        if self.health() == "dead":
            raise EngineDead("the engine has stopped")
        for request in requests:
            self.engine.check_fits(len(request.prompt))
        self._check_queue()
        if not self._streams:  # an idle thread makes no progress; the clock of health() starts with the work
            self._progress = time.monotonic()
        group = requests[0].group
        self._groups[group] = len(requests)
        streams = []
        for request in requests:
            request.group = group
            streams.append(SequenceStream(request, self._abort))
            self._streams[request] = streams[-1]
        self._commands.put(lambda: self._add(requests))
        return streams

    def _check_queue(self) -> None:
        config = self.engine.config
        waiting = sum(not group.started for group in self._groups)
        seats = max(0, config.max_num_seqs - len(self.engine.scheduler.running))
        if waiting >= config.max_queue + seats:
            raise QueueFull(f"{waiting} requests are waiting already; try again later")

    def _abort(self, request: Request) -> None:
        self._commands.put(lambda: self.engine.abort(request))

    async def reset_caches(self) -> None:
        """Forget the prefix cache and the shared suffix store, between two steps. Raises EngineDead."""
        assert self._loop is not None
        done = self._loop.create_future()
        self._resets.add(done)

        def reset() -> list[Output]:
            self.engine.reset_caches()
            self._call_on_loop(lambda: self._settle({done}))
            return []

        self._commands.put(reset)
        if self.health() == "dead":  # its thread may have ended before it could see the command
            self._settle({done})
        if not await done:
            raise EngineDead("the engine has stopped")

    def _settle(self, resets: set[asyncio.Future[bool]]) -> None:
        """Their futures tell whether the engine still lived."""
        for done in resets:
            self._resets.discard(done)
            if not done.done():
                done.set_result(not self._ended)

    def counters(self) -> EngineCounters:
        """A snapshot; its numbers may be of two neighbouring moments when a step is running."""
        return self.engine.counters()

    def health(self) -> Health:
        """Whether the thread lives and, when it has work, makes steps that do not all fail.

        A step that failed and is repeated sequence by sequence may take long, and moves on with every pass.
        """
        if self._ended:
            return "dead"
        moved_at = max(self._progress, self.engine.passed_at)
        if self._streams and time.monotonic() - moved_at > STUCK_SECONDS:
            return "stuck"
        return "failing" if self._num_failed >= FAILED_STEPS else "ok"

    def _deliver(self, outputs: list[Output]) -> None:
        for request, piece in outputs:
            stream = self._streams.get(request)
            if stream is None:
                continue
            stream.deliver(piece)
            if piece.finish is not None:
                self._release(request)

    def _end_all(self) -> None:
        self._settle(set(self._resets))
        self._deliver([(request, TokenSlice(finish="error", error_code="engine_dead")) for request in self._streams])

    def _release(self, request: Request) -> None:
        del self._streams[request]
        self._groups[request.group] -= 1
        if not self._groups[request.group]:
            del self._groups[request.group]

    # ---- the thread's side

    def _add(self, requests: Sequence[Request]) -> list[Output]:
        """Choices after the first follow it: they will share its prefix. What cannot be added fails alone."""
        leader = None
        try:
            for request in requests:
                leader = request if request.choice == 0 else leader
                self.engine.add(request, leader if request.choice else None)
        except Exception:
            logger.exception("request %s could not be added", requests[0].id)
            for request in requests:
                self.engine.abort(request)
            return [(request, TokenSlice(finish="error", error_code="internal_error")) for request in requests]
        return []

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._send(self._take_commands())
                if self.engine.has_work:
                    self._send(self._step())
                self._progress = time.monotonic()
        except BaseException:
            logger.exception("the engine's thread has died")
        finally:
            self._ended = True
            self._call_on_loop(self._end_all)  # who submits until then is among them, who comes later is refused

    def _take_commands(self) -> list[Output]:
        """Everything that was asked for meanwhile; waits when there is nothing else to do."""
        outputs: list[Output] = []
        command = None if self.engine.has_work and self._commands.empty() else self._commands.get()
        while command is not None:
            outputs += command()
            command = None if self._commands.empty() else self._commands.get()
        return outputs

    def _step(self) -> list[Output]:
        """An error here is not any one sequence's fault: it ends those that run and leaves the engine going."""
        try:
            outputs = self.engine.step()
            failed = all(piece.error_code == "internal_error" for _, piece in outputs)
        except Exception:
            logger.exception("a step failed")
            outputs, failed = self.engine.fail_all(), True
        if outputs:  # without any, a step has only computed a part of prompts
            self._num_failed = self._num_failed + 1 if failed else 0
        return outputs

    def _send(self, outputs: list[Output]) -> None:
        if outputs:
            self._call_on_loop(lambda: self._deliver(outputs))

    def _call_on_loop(self, call: Callable[[], object]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop has been closed: nobody is left to tell
            logger.debug("the event loop is closed")

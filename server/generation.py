"""One HTTP request's sequences in the engine: submitted together, merged as they come, ended together.

Knows token slices and errors, no text and no JSON.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from verdraft.scheduler.async_engine import SequenceStream
from verdraft.scheduler.outputs import TokenSlice
from verdraft.scheduler.request import Request
from verdraft.server.errors import ApiError
from verdraft.server.responses import failed
from verdraft.server.sse import SlowReader

MAX_BACKLOG = 1 << 20  # bytes of slices that wait for a slow reader, roughly as they will be sent

Submit = Callable[[Sequence[Request]], list[SequenceStream]]
T = TypeVar("T")


@dataclass(slots=True)
class Piece:
    """A slice and the choice it belongs to."""

    index: int
    slice: TokenSlice


class Observer(Protocol):
    """What wants to know when tokens arrive."""

    def tokens_after(self, seconds: float, num_tokens: int) -> None: ...


@dataclass(slots=True, eq=False)
class Generation:
    """From admission to the end of the answer. prelude()s, submit() once, next() until `done`, close() always."""

    id: str  # of the response
    observer: Observer
    bounded: bool = False  # a client may lag behind: give up when MAX_BACKLOG waits for it
    started: float = field(default_factory=time.monotonic)
    done: bool = False  # every choice has ended, or one has failed
    _streams: list[SequenceStream] = field(default_factory=list)
    _last: dict[int, float] = field(default_factory=dict)  # when a choice's last tokens came
    _pieces: list[Piece] = field(default_factory=list)
    _backlog: int = 0
    _open: int = 0
    _error: Exception | None = None
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _timer: asyncio.TimerHandle | None = None
    _prelude: asyncio.Task[Any] | None = None

    def limit(self, seconds: float, error: ApiError) -> None:
        """fail() with `error` when `seconds` have passed since now; 0: never."""
        if seconds:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.fail, error)

    async def prelude(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes before submit(), such as reading the body. Raises what fail() is given as soon as it is."""
        self._prelude = task = asyncio.ensure_future(work)
        if self._error:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._error is None or (current and current.cancelling()):
                raise
            raise self._error from None
        finally:
            self._prelude = None

    def submit(self, submit: Submit, requests: Sequence[Request]) -> None:
        """Hand the sequences to the engine. Raises EngineError, or the error that fail() was given meanwhile."""
        if self._error:
            raise self._error
        self._streams = submit(requests)
        self._open = len(self._streams)
        for index, stream in enumerate(self._streams):
            stream.listen(partial(self._put, index))

    def _put(self, index: int, piece: TokenSlice) -> None:
        self._observe(index, piece)
        self._pieces.append(Piece(index, piece))
        self._backlog += _cost(piece)
        self._open -= piece.finish is not None
        if self.bounded and self._backlog > MAX_BACKLOG:
            self.fail(SlowReader())
        self._arrived.set()

    def _observe(self, index: int, piece: TokenSlice) -> None:
        if not piece.tokens:
            return
        now = time.monotonic()
        if index in self._last:
            self.observer.tokens_after(now - self._last[index], len(piece.tokens))
        self._last[index] = now

    async def next(self) -> list[Piece]:
        """Everything that has come since the last call; waits for at least one piece.

        Raises the ApiError of a choice that failed, or what fail() was given.
        """
        assert not self.done, "next() after the end"
        while not self._pieces and not self._error:
            self._arrived.clear()
            await self._arrived.wait()
        pieces, self._pieces, self._backlog = self._pieces, [], 0
        self.done = self._open == 0 or self._error is not None
        if self._error:
            raise self._error
        for piece in pieces:
            if piece.slice.finish == "error":
                self.done = True
                raise failed(piece.slice.error_code)
        return pieces

    def fail(self, error: Exception) -> None:
        """End the request with `error`: it did not finish in time, or the server stops."""
        if self._error is None:
            self._error = error
            self._arrived.set()
            if self._prelude:
                self._prelude.cancel()

    def abort(self) -> bool:
        """End every choice with finish "abort"; False when there is nothing left to end."""
        alive = [stream for stream in self._streams if not stream.finished]
        for stream in alive:
            stream.abort()
        return bool(alive)

    async def close(self) -> None:
        """Stop whatever still runs; idempotent."""
        if self._timer:
            self._timer.cancel()
        for stream in self._streams:
            await stream.aclose()


def _cost(piece: TokenSlice) -> int:
    """About how many bytes the slice becomes as JSON, without the prompt's share, which comes once."""
    return 16 * len(piece.tokens) + sum([100 + 60 * len(entry.top) for entry in piece.logprobs])

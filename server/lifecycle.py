"""What the server is doing: loading, ready or draining; which requests are in progress; how signals change that."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Literal, TypeVar

from verdraft.server.generation import Generation
from verdraft.server.responses import draining, loading
from verdraft.server.signals import exit_now, on_stop_signals

logger = logging.getLogger("verdraft.server")

Phase = Literal["loading", "ready", "draining"]
CUT_SECONDS = 3.0  # for the last error events to leave, after the drain timeout
T = TypeVar("T")


class Lifecycle(Generic[T]):
    """`service` is whatever answers requests once it is loaded. Belongs to one event loop."""

    def __init__(self) -> None:
        self.phase: Phase = "loading"
        self.stopping = asyncio.Event()
        self._service: T | None = None
        self._live: dict[str, Generation] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def ready(self, service: T) -> None:
        """The model is loaded: admit requests, unless a signal came first."""
        self._service = service
        if self.phase == "loading":
            self.phase = "ready"

    def admit(self) -> T:
        """What a new request may use. Raises ApiError 503 `loading` or `draining`."""
        if self.phase == "draining":
            raise draining()
        return self.loaded()

    def loaded(self) -> T:
        """What a request may use that is also answered while draining. Raises ApiError 503 `loading`."""
        if self._service is None:
            raise loading()
        return self._service

    @property
    def service(self) -> T | None:
        return self._service

    @contextmanager
    def track(self, generation: Generation) -> Iterator[None]:
        """Draining waits for it, and abort() can find it."""
        self._live[generation.id] = generation
        self._idle.clear()
        try:
            yield
        finally:
            del self._live[generation.id]
            if not self._live:
                self._idle.set()

    def abort(self, response_id: str) -> bool:
        """Whether there was something to abort."""
        generation = self._live.get(response_id)
        return generation is not None and generation.abort()

    def on_signal(self) -> None:
        """First signal: drain. While loading, or the second time: end at once."""
        if self.phase != "ready":
            exit_now()
        self.phase = "draining"
        logger.info("draining: %d requests in progress", len(self._live))
        self.stopping.set()

    async def drain(self, seconds: float) -> None:
        """Let requests finish; after `seconds` the rest end with the error `draining`."""
        if await _within(seconds, self._idle):
            return
        logger.warning("the drain timeout has passed: ending %d requests", len(self._live))
        for generation in list(self._live.values()):
            generation.fail(draining())
        await _within(CUT_SECONDS, self._idle)

    def install_signals(self) -> None:
        """SIGTERM and SIGINT go to on_signal(), in the loop."""
        loop = asyncio.get_running_loop()
        on_stop_signals(lambda: loop.call_soon_threadsafe(self.on_signal))


async def _within(seconds: float, event: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True

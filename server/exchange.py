"""One generation request from its tokens to its last byte: reads the engine's slices, accounts for them, answers.

Streamed and plain answers share everything but the last step.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from verdraft.server.answers import Answer
from verdraft.server.choices import Event, Finish, join
from verdraft.server.errors import ApiError
from verdraft.server.generation import Generation, Piece
from verdraft.server.metrics import Metrics
from verdraft.server.prepare import Prepared
from verdraft.server.report import Report
from verdraft.server.responses import unexpected
from verdraft.server.sse import EventStream, SlowReader

# A request of several choices is counted once, under the first of these that one of them has.
WORST_FIRST: tuple[Finish, ...] = ("error", "abort", "length", "tool_calls", "stop")


class Exchange:
    """whole() or stream(), once; settle() always."""

    def __init__(
        self, generation: Generation, prepared: Prepared, answer: Answer, report: Report, metrics: Metrics
    ) -> None:
        self.report = report
        self.reason: Finish | None = None  # set by settle()
        self._generation = generation
        self._answer = answer
        self._metrics = metrics
        self._finishes: set[Finish] = set()
        self._readers = [prepared.reader(index) for index in range(prepared.num_choices)]

    async def whole(self) -> dict[str, Any]:
        """The plain answer: the join of what a stream would have sent."""
        events: list[list[Event]] = [[] for _ in self._readers]
        async for batch in self._batches():
            for event in batch:
                events[event.index].append(event)
        return self._answer.whole([join(each) for each in events], self.report)

    async def stream(self, out: EventStream) -> None:
        """Chunks as they come; an error before the first byte is raised, a later one becomes an event."""
        try:
            async for batch in self._batches():
                await self._send(out, [chunk for event in batch for chunk in self._answer.chunks(event)])
        except SlowReader:
            raise
        except Exception as error:
            if not out.opened:
                raise
            answer = error if isinstance(error, ApiError) else unexpected(error)
            self.settle("error")
            self._metrics.error(answer)
            await self._end(out, self._answer.failure(answer))

    async def _send(self, out: EventStream, chunks: list[dict[str, Any]]) -> None:
        if not out.opened and chunks:
            chunks[0] |= self._answer.opening()
            await out.open()
        if self._generation.done:
            await self._end(out, self._answer.closed(chunks, self.report))
        elif chunks:
            await out.write(self._answer.wire.frame(chunks))

    async def _end(self, out: EventStream, chunks: list[dict[str, Any]]) -> None:
        wire = self._answer.wire
        await out.end(wire.frame(chunks) + wire.end)

    async def _batches(self) -> AsyncIterator[list[Event]]:
        """What has come since the last batch, one event for each choice that moved."""
        done = False
        while not done:
            batch = self._read(await self._generation.next())
            done = self._generation.done
            if done:  # count before the last byte: who has the answer may look at /metrics
                self.settle()
            yield batch

    def _read(self, pieces: Sequence[Piece]) -> list[Event]:
        events: dict[int, list[Event]] = {}
        for piece in pieces:
            event = self._readers[piece.index].read(piece.slice)
            events.setdefault(piece.index, []).append(event)
            if piece.slice.summary:
                self.report.add(piece.index, piece.slice.summary, self._readers[piece.index].reasoning_tokens)
                self._metrics.sequence(piece.slice.summary)
            if event.finish:
                self._finishes.add(event.finish)
        return [join(each) for each in events.values()]

    def settle(self, interrupted: Finish | None = None) -> None:
        """Count the request under one finish reason, once; `interrupted` when it did not come to its own end."""
        if self.reason is None:
            reasons = self._finishes | ({interrupted} if interrupted else set())
            reason = next(reason for reason in WORST_FIRST if reason in reasons)
            self.reason = reason
            self._metrics.finished(reason)
            if reason == "abort":
                self._metrics.aborted.inc()

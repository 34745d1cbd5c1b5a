"""An answer as blocks that open, grow and close one after the other: what /v1/responses and /v1/messages stream.

A plain answer is the list of blocks at the end. Knows no endpoint's names for any of it.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from verdraft.server.answers import Answer, Json
from verdraft.server.choices import Entry, Event, Finish
from verdraft.server.report import Report
from verdraft.server.sse import NAMED, Wire
from verdraft.server.thinking import CallPart

Kind: TypeAlias = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """A part of the answer; `index` is its place. The text of a call is its arguments, as JSON."""

    kind: Kind
    index: int
    text: str = ""
    open: bool = True
    name: str = ""  # of the function that is called
    call_id: str = ""
    entries: list[Entry] = field(default_factory=list)  # the logprobs of its tokens, for text alone


@dataclass(frozen=True, slots=True)
class Change:
    """One block has opened, closed, or grown by `delta`, which `entries` belong to."""

    what: Literal["opened", "grown", "closed"]
    block: Block
    delta: str = ""
    entries: Sequence[Entry] = ()


@dataclass(slots=True)
class Blocks:
    """feed() every event of the answer; there is at least one block in the end."""

    all: list[Block] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    stop: str = ""  # the stop string that ended the text
    pending: list[Entry] = field(default_factory=list)  # of tokens whose text is still held back

    def feed(self, event: Event) -> Iterator[Change]:
        """What the event changes, in order."""
        self.tokens += event.tokens
        self.pending += event.entries
        self.finish, self.stop = event.finish, event.stop
        if event.reasoning:
            yield from self._grow("reasoning", event.reasoning)
        if event.text or (event.finish and not self.all and not event.calls):
            yield from self._grow("text", event.text)
        for part in event.calls:
            yield from self._call(part)
        if event.finish:
            yield from self._close()

    def _grow(self, kind: Kind, text: str) -> Iterator[Change]:
        if not self.all or self.all[-1].kind != kind:
            yield from self._open(Block(kind, len(self.all)))
        if text:
            self.all[-1].text += text
            yield Change("grown", self.all[-1], text, self._take_entries(kind))

    def _call(self, part: CallPart) -> Iterator[Change]:
        if part.name:
            yield from self._open(Block("call", len(self.all), name=part.name, call_id=part.id))
        yield from self._grow("call", part.arguments)

    def _open(self, block: Block) -> Iterator[Change]:
        yield from self._close()
        self.all.append(block)
        yield Change("opened", block)

    def _take_entries(self, kind: Kind) -> Sequence[Entry]:
        """Those of the text so far; they are asked for only where an answer is nothing but text."""
        taken = self.pending if kind == "text" else []
        self.all[-1].entries += taken
        self.pending = []
        return taken

    def _close(self) -> Iterator[Change]:
        if self.all and self.all[-1].open:
            self.all[-1].open = False
            self._take_entries(self.all[-1].kind)
            yield Change("closed", self.all[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksAnswer(Answer):
    """An answer of one choice, streamed as named events."""

    blocks: Blocks = field(default_factory=Blocks)

    wire: ClassVar[Wire] = NAMED

    @abstractmethod
    def final(self, report: Report) -> Json:
        """The plain answer, once `blocks` has everything."""

    @abstractmethod
    def started(self) -> Iterator[Json]:
        """The events before the first block."""

    @abstractmethod
    def changed(self, change: Change) -> Iterator[Json]:
        """The events that tell of one change."""

    @abstractmethod
    def ended(self, report: Report) -> Iterator[Json]:
        """The events behind the last block."""

    def whole(self, events: Sequence[Event], report: Report) -> Json:
        """The plain answer."""
        (event,) = events
        for _ in self.blocks.feed(event):
            pass
        return self.final(report)

    def chunks(self, event: Event) -> Iterator[Json]:
        """What was added."""
        if event.first:
            yield from self.started()
        for change in self.blocks.feed(event):
            yield from self.changed(change)

    def closed(self, chunks: list[Json], report: Report) -> list[Json]:
        """The last events of a stream."""
        return [*chunks, *self.ended(report)]

    def ids(self) -> Json:
        """The ids of prompt and answer when they were asked for."""
        return {"prompt_token_ids": self.prompt_of(0), "token_ids": self.blocks.tokens} if self.with_ids else {}

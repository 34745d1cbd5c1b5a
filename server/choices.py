"""One choice of an answer: from the engine's slices to events of text, ids and logprobs.

Streamed and plain answers both go through here; a plain answer is the join of its events.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from verdraft.scheduler.outputs import FinishReason, TokenLogprobs, TokenSlice
from verdraft.server.assembler import TextAssembler
from verdraft.server.logprob_text import OutputTexts, PromptTexts, TokenNames
from verdraft.server.thinking import CallPart, NoThoughts, Said, Splitter

Finish: TypeAlias = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True, slots=True)
class Entry:
    """The logprobs of one token. `offset` is its place in the answer's text, in code points."""

    token: int
    logprob: float | None  # None: the first prompt token, which nothing predicts
    top: tuple[tuple[int, float], ...] = ()
    offset: int = 0
    texts: tuple[str, ...] = ()  # what the token, then each of `top`, adds to the text at this place


@dataclass(slots=True)
class Event:
    """What was added to a choice. Not frozen: one is made for every token, and that would take thrice as long."""

    index: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    entries: tuple[Entry, ...] = ()
    finish: Finish | None = None
    first: bool = False
    reasoning: str = ""  # comes before `text`
    stop: str = ""  # with `finish`: the stop string that ended the text
    calls: tuple[CallPart, ...] = ()  # come after `text`


def join(events: Sequence[Event]) -> Event:
    """All events of one choice, in order, as one."""
    if len(events) == 1:
        return events[0]
    return Event(
        events[0].index,
        "".join(event.text for event in events),
        tuple(token for event in events for token in event.tokens),
        tuple(entry for event in events for entry in event.entries),
        events[-1].finish,
        events[0].first,
        "".join(event.reasoning for event in events),
        events[-1].stop,
        tuple(part for event in events for part in event.calls),
    )


@dataclass(slots=True)
class Echo:
    """The prompt as a completion repeats it; `tokens` are its ids when their logprobs are wanted."""

    text: str = ""
    tokens: Sequence[int] = ()


@dataclass(slots=True)
class ChoiceReader:
    """read() every slice in order. `index` is the choice's index in the response."""

    index: int
    assembler: TextAssembler
    tokens: TokenNames
    echo: Echo = field(default_factory=Echo)
    splitter: Splitter = field(default_factory=NoThoughts)
    reasoning_tokens: int = 0  # so far, the marks included
    _started: bool = False
    _texts: OutputTexts = field(init=False)

    def __post_init__(self) -> None:
        self._texts = OutputTexts(self.tokens, len(self.echo.text), self.assembler.invisible)

    def read(self, piece: TokenSlice) -> Event:
        """What the slice adds; its text may be held back, its ids and logprobs never are."""
        first, self._started = not self._started, True
        entries = self._prompt_entries(piece.prompt_logprobs) if first else []
        entries += self._entries(piece.tokens, piece.logprobs)
        said = self._said(piece)
        text = (self.echo.text if first else "") + said.content
        stop = self.assembler.stop if piece.finish else ""
        finish: Finish | None = "tool_calls" if piece.finish == "stop" and self.splitter.called else piece.finish
        return Event(self.index, text, piece.tokens, tuple(entries), finish, first, said.reasoning, stop, said.calls)

    def _said(self, piece: TokenSlice) -> Said:
        settled = self.splitter.settled
        said = self.splitter.feed(self.assembler.feed(piece.tokens)) if settled else self._thought(piece.tokens)
        if piece.finish:
            said += self.splitter.feed(self.assembler.finish()) + self.splitter.finish()
        return said

    def _thought(self, tokens: Sequence[int]) -> Said:
        """Token by token, because those within the thoughts are counted."""
        said = Said()
        for token in tokens:
            inside = self.splitter.inside
            said += self.splitter.feed(self.assembler.feed((token,)))
            self.reasoning_tokens += inside or self.splitter.inside
        return said

    def _entries(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Entry]:
        if not logprobs:  # nobody asked
            return []
        pairs = zip(tokens, logprobs, strict=True)
        return [_entry(self._texts, token, one.logprob, one.top) for token, one in pairs]

    def _prompt_entries(self, logprobs: Sequence[TokenLogprobs]) -> list[Entry]:
        if not self.echo.tokens:
            return []
        texts = PromptTexts(self.tokens, self.echo.text)
        entries = [_entry(texts, self.echo.tokens[0], None, ())]
        for token, one in zip(self.echo.tokens[1:], logprobs, strict=True):
            entries.append(_entry(texts, token, one.logprob, one.top))
        return entries


def _entry(texts: OutputTexts, token: int, logprob: float | None, top: tuple[tuple[int, float], ...]) -> Entry:
    """The entry of the next token; moves `texts` behind it."""
    shown = (texts.text(token), *(texts.text(other) for other, _ in top))
    entry = Entry(token, logprob, top, texts.offset, shown)
    texts.advance(token)
    return entry

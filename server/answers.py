"""The JSON of both endpoints' answers: whole ones and chunks (HTTP contract, sections 4, 5, 7 and 8)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verdraft.server.choices import Entry, Event
from verdraft.server.logprob_text import TokenNames

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(ABC):
    """What both shapes share. `prompts` are the prompts' ids, `n` the choices of each."""

    id: str
    model: str
    created: int
    tokens: TokenNames
    prompts: Sequence[Sequence[int]]
    n: int
    with_ids: bool
    logprobs: int | None  # None: not asked for

    whole_object = ""
    chunk_object = ""

    def envelope(self, kind: str, choices: list[Json]) -> Json:
        """What every answer and chunk has."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def chunk(self, choice: Json, finish: str | None = None) -> Json:
        """A chunk of one choice."""
        return self.envelope(self.chunk_object, [choice | {"finish_reason": finish}])

    def opening(self) -> Json:
        """What only the very first chunk has."""
        return {}

    @abstractmethod
    def whole(self, events: Sequence[Event]) -> Json:
        """The plain answer; one joined event for each choice."""

    @abstractmethod
    def chunks(self, event: Event) -> Iterator[Json]:
        """What was added to one choice, then its finish reason."""

    def usage_chunk(self, usage: Json) -> Json:
        """The last chunk of a stream that asked for usage."""
        return self.envelope(self.chunk_object, []) | {"usage": usage}

    def bare(self, event: Event) -> bool:
        """Whether the event has nothing that this client would see before the finish reason."""
        shown = event.tokens if self.with_ids else event.entries
        return not event.text and not shown

    def prompt_of(self, index: int) -> list[int]:
        return list(self.prompts[index // self.n])


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    __slots__ = ()
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, events: Sequence[Event]) -> Json:
        """The plain answer; one joined event for each choice."""
        return self.envelope(self.whole_object, [self._choice(event) for event in events]) | self.opening()

    def opening(self) -> Json:
        """What only the plain answer and the very first chunk have."""
        return {"prompt_token_ids": self.prompt_of(0)} if self.with_ids else {}

    def _choice(self, event: Event) -> Json:
        message = {"role": "assistant", "content": event.text, "refusal": None}
        choice = {"index": event.index, "message": message, "logprobs": self._logprobs(event)}
        return choice | self._ids(event) | {"finish_reason": event.finish}

    def chunks(self, event: Event) -> Iterator[Json]:
        """The role once, then what was added, then the finish reason."""
        if event.first:
            yield self.chunk(self._delta(event.index, {"role": "assistant", "content": ""}))
        added = {"logprobs": self._logprobs(event) if event.entries else None} | self._ids(event)
        if event.text or (event.finish is None and not self.bare(event)):
            yield self.chunk(self._delta(event.index, {"content": event.text}) | added)
            added = {}
        if event.finish:
            yield self.chunk(self._delta(event.index, {}) | added, event.finish)

    def _delta(self, index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None}

    def _ids(self, event: Event) -> Json:
        return {"token_ids": list(event.tokens)} if self.with_ids else {}

    def _logprobs(self, event: Event) -> Json | None:
        if self.logprobs is None:
            return None
        return {"content": [self._entry(entry) for entry in event.entries], "refusal": None}

    def _entry(self, entry: Entry) -> Json:
        tops = [self._token(token, value) for token, value in entry.top]
        return self._token(entry.token, entry.logprob) | {"top_logprobs": tops}

    def _token(self, token: int, logprob: float | None) -> Json:
        raw = self.tokens.token_bytes(token)
        return {
            "token": self.tokens.token_text(token),
            "logprob": logprob,
            "bytes": None if raw is None else list(raw),
        }


class CompletionAnswer(Answer):
    """/v1/completions."""

    __slots__ = ()
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def whole(self, events: Sequence[Event]) -> Json:
        """The plain answer; one joined event for each choice."""
        choices = [self._choice(event, event.text) | {"finish_reason": event.finish} for event in events]
        return self.envelope(self.whole_object, choices)

    def _choice(self, event: Event, text: str) -> Json:
        choice: Json = {"index": event.index, "text": text, "logprobs": self._logprobs(event)}
        if self.with_ids:
            choice["token_ids"] = list(event.tokens)
            if event.first:
                choice["prompt_token_ids"] = self.prompt_of(event.index)
        return choice

    def chunks(self, event: Event) -> Iterator[Json]:
        """What was added, then the finish reason."""
        choice = self._choice(event, event.text)
        if event.text or (event.finish is None and not self.bare(event)):
            yield self.chunk(choice)
            choice = {"index": event.index, "text": "", "logprobs": None}
        if event.finish:
            yield self.chunk(choice, event.finish)

    def _logprobs(self, event: Event) -> Json | None:
        if self.logprobs is None:
            return None
        return {
            "tokens": [entry.texts[0] for entry in event.entries],
            "token_logprobs": [entry.logprob for entry in event.entries],
            "top_logprobs": [self._top(entry) for entry in event.entries],
            "text_offset": [entry.offset for entry in event.entries],
        }

    def _top(self, entry: Entry) -> dict[str, float] | None:
        """By token text. Of two tokens with one text the likelier counts, but the chosen token always does."""
        if entry.logprob is None:
            return None
        shown: dict[str, float] = {}
        for text, (_, value) in zip(entry.texts[1:], entry.top, strict=True):
            shown.setdefault(text, value)
        return shown | {entry.texts[0]: entry.logprob}

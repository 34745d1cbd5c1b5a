"""The JSON of chat and text completions: whole answers and chunks (HTTP contract, sections 4, 5, 7 and 8)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from verdraft.server.choices import Entry, Event
from verdraft.server.errors import ApiError
from verdraft.server.logprob_text import TokenNames
from verdraft.server.prepare import Prepared
from verdraft.server.report import Report
from verdraft.server.sse import DATA, Wire
from verdraft.server.thinking import CallPart

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(ABC):
    """What the exchange asks of an endpoint's shape. `created` in seconds since 1970."""

    id: str
    model: str
    created: int
    prepared: Prepared

    wire: ClassVar[Wire] = DATA

    @property
    def with_ids(self) -> bool:
        return self.prepared.options.return_token_ids

    @abstractmethod
    def whole(self, events: Sequence[Event], report: Report) -> Json:
        """The plain answer; one joined event for each choice."""

    def opening(self) -> Json:
        """What only the very first chunk has."""
        return {}

    @abstractmethod
    def chunks(self, event: Event) -> Iterator[Json]:
        """What was added to one choice, then its finish reason."""

    @abstractmethod
    def closed(self, chunks: list[Json], report: Report) -> list[Json]:
        """The last chunks of a stream, with what is only known now."""

    def failure(self, error: ApiError) -> list[Json]:
        """How a stream that has begun ends in an error."""
        return [error.body()]

    def prompt_of(self, index: int) -> list[int]:
        return list(self.prepared.prompts[index // self.prepared.options.n])

    def speculation(self, report: Report) -> Json:
        """The field `speculation` when it was asked for."""
        return {"speculation": report.speculation()} if self.prepared.options.return_speculation else {}


class ChoicesAnswer(Answer):
    """What the two OpenAI shapes with `choices` share."""

    __slots__ = ()
    whole_object = ""
    chunk_object = ""

    @property
    def logprobs(self) -> int | None:
        return self.prepared.options.sampling.logprobs

    def envelope(self, kind: str, choices: list[Json]) -> Json:
        """What every answer and chunk has."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def chunk(self, choice: Json, finish: str | None = None) -> Json:
        """A chunk of one choice."""
        return self.envelope(self.chunk_object, [choice | {"finish_reason": finish}])

    def closed(self, chunks: list[Json], report: Report) -> list[Json]:
        """The usage in a chunk of its own when the stream asked for it; the speculation report in the very last."""
        if self.prepared.options.include_usage:
            chunks.append(self.envelope(self.chunk_object, []) | {"usage": report.usage()})
        chunks[-1] |= self.speculation(report)
        return chunks

    def bare(self, event: Event) -> bool:
        """Whether the event has nothing that this client would see before the finish reason."""
        shown = event.tokens if self.with_ids else event.entries
        return not event.text and not shown


class ChatAnswer(ChoicesAnswer):
    """/v1/chat/completions."""

    __slots__ = ()
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, events: Sequence[Event], report: Report) -> Json:
        """The plain answer; one joined event for each choice."""
        answer = self.envelope(self.whole_object, [self._choice(event) for event in events]) | self.opening()
        return answer | {"usage": report.usage()} | self.speculation(report)

    def opening(self) -> Json:
        """What only the plain answer and the very first chunk have."""
        return {"prompt_token_ids": self.prompt_of(0)} if self.with_ids else {}

    def _choice(self, event: Event) -> Json:
        calls = _whole_calls(event.calls)
        message: Json = {"role": "assistant", "content": event.text or (None if calls else ""), "refusal": None}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": event.reasoning} if event.reasoning else {}
        choice = {"index": event.index, "message": message, "logprobs": self._logprobs(event)}
        return choice | self._ids(event) | {"finish_reason": event.finish}

    def chunks(self, event: Event) -> Iterator[Json]:
        """The role once, then what was added: thoughts, text, calls; then the finish reason."""
        if event.first:
            yield self.chunk(self._delta(event.index, {"role": "assistant", "content": ""}))
        added = {"logprobs": self._logprobs(event) if event.entries else None} | self._ids(event)
        if event.reasoning:
            yield self.chunk(self._delta(event.index, {"reasoning_content": event.reasoning}) | added)
            added = {}
        if event.text or (added and event.finish is None and not event.calls and not self.bare(event)):
            yield self.chunk(self._delta(event.index, {"content": event.text}) | added)
            added = {}
        for part in event.calls:
            yield self.chunk(self._delta(event.index, {"tool_calls": [_call(part)]}) | added)
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
        return entry_json(self.prepared.text.tokenizer, entry)


class CompletionAnswer(ChoicesAnswer):
    """/v1/completions."""

    __slots__ = ()
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def whole(self, events: Sequence[Event], report: Report) -> Json:
        """The plain answer; one joined event for each choice."""
        choices = [self._choice(event, event.text) | {"finish_reason": event.finish} for event in events]
        return self.envelope(self.whole_object, choices) | {"usage": report.usage()} | self.speculation(report)

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


def entry_json(tokens: TokenNames, entry: Entry, no_bytes: Sequence[int] | None = None) -> Json:
    """One token's logprobs and those of the likeliest; `no_bytes` stand for the bytes of a special token."""

    def named(token: int, logprob: float | None) -> Json:
        raw = tokens.token_bytes(token)
        return {"token": tokens.token_text(token), "logprob": logprob, "bytes": no_bytes if raw is None else list(raw)}

    return named(entry.token, entry.logprob) | {"top_logprobs": [named(*each) for each in entry.top]}


def _call(part: CallPart) -> Json:
    """A delta of `tool_calls`: the first of a call says all about it."""
    if not part.name:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


def _whole_calls(parts: Sequence[CallPart]) -> list[Json]:
    """`tool_calls` of a plain answer."""
    calls: list[Json] = []
    for part in parts:
        if part.name:
            calls.append({"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}})
        calls[part.index]["function"]["arguments"] += part.arguments
    return calls

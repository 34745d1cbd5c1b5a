"""The JSON of /v1/responses: the response object, and the events of its stream in OpenAI's order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from verdraft.server.answers import Json, entry_json
from verdraft.server.blocks import Block, BlocksAnswer, Change
from verdraft.server.choices import Entry
from verdraft.server.errors import ApiError
from verdraft.server.report import Report

INCOMPLETE = {"length": "max_output_tokens", "abort": "abort"}  # finish reason -> incomplete_details.reason
ITEM_PREFIX = {"text": "msg", "reasoning": "rs", "call": "fc"}
DELTAS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesAnswer(BlocksAnswer):
    """Nothing is stored, so the object says `store: false` and can be asked for only once."""

    numbers: Iterator[int] = field(default_factory=count)

    def final(self, report: Report) -> Json:
        """The response object."""
        reason = INCOMPLETE.get(self.blocks.finish or "")
        done = {
            "status": "incomplete" if reason else "completed",
            "incomplete_details": {"reason": reason} if reason else None,
            "output": [self._item(block) for block in self.blocks.all],
            "usage": _usage(report),
        }
        return self._object() | done | self.ids() | self.speculation(report)

    def _object(self) -> Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **self.prepared.shown,
        }

    def started(self) -> Iterator[Json]:
        """response.created and response.in_progress."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._object())

    def changed(self, change: Change) -> Iterator[Json]:
        """An item and its one part (calls have none) open together; the text grows; they close from the inside out."""
        block, place = change.block, self._place(change.block)
        item = {"output_index": block.index, "item": self._item(block)}
        parts = [self._part(block)] if block.kind != "call" else []
        match change.what:
            case "opened":
                yield self._event("response.output_item.added", **item)
                for part in parts:
                    yield self._event("response.content_part.added", **place, part=part)
            case "grown":
                yield self._event(
                    f"{DELTAS[block.kind]}.delta", **place, delta=change.delta, **self._logprobs(block, change.entries)
                )
            case "closed":
                yield self._event(
                    f"{DELTAS[block.kind]}.done", **place, **_done(block), **self._logprobs(block, block.entries)
                )
                for part in parts:
                    yield self._event("response.content_part.done", **place, part=part)
                yield self._event("response.output_item.done", **item)

    def ended(self, report: Report) -> Iterator[Json]:
        """response.completed or response.incomplete."""
        response = self.final(report)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> list[Json]:
        """response.failed with what there is of the answer."""
        output = [self._item(block) for block in self.blocks.all]
        response = self._object() | {"status": "failed", "output": output} | error.body()
        return [self._event("response.failed", response=response)]

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "sequence_number": next(self.numbers), **fields}

    def _place(self, block: Block) -> Json:
        place = {"item_id": self._item_id(block), "output_index": block.index}
        return place | ({} if block.kind == "call" else {"content_index": 0})

    def _item_id(self, block: Block) -> str:
        return f"{ITEM_PREFIX[block.kind]}_{self.id.partition('_')[2]}{block.index}"

    def _item(self, block: Block) -> Json:
        cut = self.blocks.finish in INCOMPLETE and block is self.blocks.all[-1]
        status = "in_progress" if block.open else "incomplete" if cut else "completed"
        item: Json = {"id": self._item_id(block), "status": status}
        content = {"content": [] if block.open else [self._part(block)]}
        match block.kind:
            case "reasoning":
                return item | content | {"type": "reasoning", "summary": []}
            case "call":
                return item | {"type": "function_call", "call_id": block.call_id, **_done(block)}
        return item | content | {"type": "message", "role": "assistant"}

    def _part(self, block: Block) -> Json:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], **self._logprobs(block, block.entries)}

    def _logprobs(self, block: Block, entries: Sequence[Entry]) -> Json:
        """Empty when nobody asked, but the field belongs to the events of text; this API has no null for bytes."""
        tokens = self.prepared.text.tokenizer
        return {"logprobs": [entry_json(tokens, entry, ()) for entry in entries]} if block.kind == "text" else {}


def _done(block: Block) -> Json:
    """What a block was, as its last events say it."""
    return {"name": block.name, "arguments": block.text} if block.kind == "call" else {"text": block.text}


def _usage(report: Report) -> Json:
    """The same numbers under this endpoint's names."""
    usage = report.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0} | usage.get("completion_tokens_details", {}),
        "total_tokens": usage["total_tokens"],
    }

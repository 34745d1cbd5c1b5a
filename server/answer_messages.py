"""The JSON of /v1/messages: the message object, and the events of its stream in Anthropic's order."""

import json
from collections.abc import Iterator
from typing import Any

from verdraft.server.answers import Json
from verdraft.server.blocks import Block, BlocksAnswer, Change
from verdraft.server.errors import ApiError
from verdraft.server.report import Report

# By finish reason.
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "abort"}


class MessagesAnswer(BlocksAnswer):
    """Input tokens are counted apart: those that were computed, and those that came from the prefix cache."""

    __slots__ = ()

    def final(self, report: Report) -> Json:
        """The message object."""
        content = [_content(block, block.text) for block in self.blocks.all]
        message = self._message() | {"content": content} | self._ending() | {"usage": _usage(report)}
        return message | self.ids() | self.speculation(report)

    def _message(self) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _ending(self) -> Json:
        stop = self.blocks.stop
        reason = "stop_sequence" if stop else STOP_REASONS.get(self.blocks.finish or "")
        return {"stop_reason": reason, "stop_sequence": stop or None}

    def started(self) -> Iterator[Json]:
        """message_start. How much of the prompt was cached is known at the end."""
        usage = {"input_tokens": len(self.prompt_of(0)), "cache_read_input_tokens": 0, "output_tokens": 0}
        yield {"type": "message_start", "message": self._message() | {"usage": usage}}

    def changed(self, change: Change) -> Iterator[Json]:
        """A content block starts, grows or stops; one ping stands behind the first start."""
        block = change.block
        match change.what:
            case "opened":
                yield {"type": "content_block_start", "index": block.index, "content_block": _content(block, "")}
                if block.index == 0:
                    yield {"type": "ping"}
            case "grown":
                yield {"type": "content_block_delta", "index": block.index, "delta": _delta(block, change.delta)}
            case "closed":
                yield {"type": "content_block_stop", "index": block.index}

    def ended(self, report: Report) -> Iterator[Json]:
        """message_delta, message_stop."""
        ending: Json = {"type": "message_delta", "delta": self._ending(), "usage": _usage(report)}
        yield ending | self.ids() | self.speculation(report)
        yield {"type": "message_stop"}

    def failure(self, error: ApiError) -> list[Json]:
        """An error event."""
        return [{"type": "error", **error.body()}]


def _content(block: Block, text: str) -> Json:
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(text)}
    return {"type": "text", "text": text}


def _input(arguments: str) -> Any:
    """Of a call that was cut there is none."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return {}


def _delta(block: Block, text: str) -> Json:
    match block.kind:
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}
    return {"type": "text_delta", "text": text}


def _usage(report: Report) -> Json:
    return {
        "input_tokens": report.prompt_tokens - report.cached_tokens,
        "cache_read_input_tokens": report.cached_tokens,
        "output_tokens": report.completion_tokens,
    }

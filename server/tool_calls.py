"""Tells the calls in an answer's text from what it says: calls that a grammar forced, and models' own formats.

Text in, parts of calls out. Knows no endpoint and no tokens.
"""

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from verdraft.server.thinking import CallPart, Said, Splitter


def new_call(index: int, name: str, arguments: str = "") -> CallPart:
    """The first part of a call, with an id of its own."""
    return CallPart(index, arguments, name, f"call_{uuid.uuid4().hex[:24]}")


class ForcedCall:
    """The whole text is one of `heads`, by function, then the arguments, then `tail`; it may be cut anywhere."""

    inside, settled = False, True

    def __init__(self, heads: Mapping[str, str], tail: str) -> None:
        self._heads = heads
        self._tail = tail
        self._text = ""
        self._start = -1  # where the arguments begin, once the function is known
        self._num_sent = 0
        self.called = False

    def feed(self, text: str) -> Said:
        """What became certain of the call."""
        self._text += text
        if self._start < 0:
            return self._begin()
        return self._send(len(self._text) - len(self._tail))

    def finish(self) -> Said:
        """The rest, without the tail of a call that is complete."""
        self.called = self._start >= 0 and _is_json(self._text)
        if self._start < 0:
            return Said()
        return self._send(len(self._text) - (len(self._tail) if self.called else 0))

    def _begin(self) -> Said:
        for name, head in self._heads.items():
            if self._text.startswith(head):
                self._start = self._num_sent = len(head)
                return Said(calls=(new_call(0, name),)) + self._send(len(self._text) - len(self._tail))
        return Said()

    def _send(self, end: int) -> Said:
        start, self._num_sent = self._num_sent, max(end, self._num_sent)
        piece = self._text[start : self._num_sent]
        return Said(calls=(CallPart(0, piece),)) if piece else Said()


class MarkedCalls:
    """`<tool_call>` JSON `</tool_call>` anywhere in the text (Qwen, Hermes), any number of times.

    What stands between the marks and is no call stays text; so does the space around calls unless text follows.
    """

    inside, settled = False, True
    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._pending = ""
        self._num_calls = 0
        self._unfinished = False

    @property
    def called(self) -> bool:
        return self._num_calls > 0 and not self._unfinished

    def feed(self, text: str) -> Said:
        """What became certain; a call comes whole."""
        self._pending += text
        said = Said()
        while (start := self._pending.find(self.OPEN)) >= 0 and (end := self._pending.find(self.CLOSE, start)) >= 0:
            said += self._block(start, end)
            self._pending = self._pending[end + len(self.CLOSE) :]
        cut = len(self._pending[:start].rstrip()) if start >= 0 else len(self._pending) - self._hold_len()
        said += self._text(self._pending[:cut])
        self._pending = self._pending[cut:]
        return said

    def finish(self) -> Said:
        """A call that was cut is text."""
        self._unfinished = self.OPEN in self._pending
        rest, self._pending = self._pending, ""
        return Said(content=rest if rest.strip() or not self._num_calls else "")

    def _text(self, text: str) -> Said:
        return Said(content=text) if text and (text.strip() or not self._num_calls) else Said()

    def _block(self, start: int, end: int) -> Said:
        """The text up to the end of a marked block, with the call in it."""
        found = tuple(read_calls(self._pending[start + len(self.OPEN) : end], self._num_calls))
        if not found:
            return self._text(self._pending[: end + len(self.CLOSE)])
        said = self._text(self._pending[:start].rstrip()) + Said(calls=found)
        self._num_calls += len(found)
        return said

    def _hold_len(self) -> int:
        """The longest tail that may become a mark, with the space before it."""
        text = self._pending
        size = next(size for size in reversed(range(len(self.OPEN))) if text.endswith(self.OPEN[:size]))
        return len(text) - len(text[: len(text) - size].rstrip())


class BareCalls:
    """The whole text is JSON of one or more calls (Llama 3.x): held back until the end when it begins like that."""

    inside, settled = False, True

    def __init__(self) -> None:
        self._pending = ""
        self._plain = False
        self.called = False

    def feed(self, text: str) -> Said:
        """Nothing as long as it may be calls."""
        self._pending += text
        start = self._pending.lstrip()
        self._plain = self._plain or (bool(start) and start[0] != "{")
        if not self._plain:
            return Said()
        ready, self._pending = self._pending, ""
        return Said(content=ready)

    def finish(self) -> Said:
        """The calls, or the text if it is none."""
        found = tuple(read_calls(self._pending, 0))
        self.called = bool(found)
        return Said(calls=found) if found else Said(content=self._pending)


class CallsAfterThoughts:
    """Thoughts come first; what is said then may hold calls."""

    def __init__(self, thoughts: Splitter, calls: Splitter) -> None:
        self._thoughts = thoughts
        self._calls = calls

    @property
    def inside(self) -> bool:
        return self._thoughts.inside

    @property
    def settled(self) -> bool:
        return self._thoughts.settled

    @property
    def called(self) -> bool:
        return self._calls.called

    def feed(self, text: str) -> Said:
        return self._sorted(self._thoughts.feed(text))

    def finish(self) -> Said:
        return self._sorted(self._thoughts.finish()) + self._calls.finish()

    def _sorted(self, said: Said) -> Said:
        found = self._calls.feed(said.content)
        return Said(said.reasoning, found.content, found.calls)


def read_calls(text: str, first: int) -> Iterator[CallPart]:
    """Calls that the text consists of, numbered from `first`; none when any of it is something else."""
    values = _values(text)
    if all(_is_call(value) for value in values):
        for index, value in enumerate(values, first):
            arguments = value.get("arguments", value.get("parameters"))
            yield new_call(index, value["name"], json.dumps(arguments, ensure_ascii=False))


def _is_call(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return False
    return isinstance(value.get("arguments", value.get("parameters")), dict)


def _values(text: str) -> Sequence[Any]:
    """JSON values with space or semicolons between them; none when the text is anything else."""
    decoder, found, place = json.JSONDecoder(), [], 0
    text = text.strip()
    try:
        while place < len(text):
            value, place = decoder.raw_decode(text, place)
            found.append(value)
            place = len(text) - len(text[place:].lstrip("; \t\n\r"))
    except (ValueError, RecursionError):
        return ()
    return found


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def own_format(template: str) -> Callable[[], Splitter] | None:
    """How a model whose chat template this is writes calls; None when it is not known to write any."""
    if MarkedCalls.OPEN in template:
        return MarkedCalls
    return BareCalls if '"parameters":' in template and "tools" in template else None

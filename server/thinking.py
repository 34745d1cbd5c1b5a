"""Tells what a model thinks from what it says: `<think>` ... `</think>` in the text of its answer.

Knows the two marks and text, and where a prompt leaves off.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from verdraft.server.tokenizer import TextTokenizer

OPEN, CLOSE = "<think>", "</think>"
THINKING_SWITCH = "enable_thinking"  # the variable of templates that can do without (Qwen3 and others)


@dataclass(frozen=True, slots=True)
class CallPart:
    """More of the arguments of call `index`, as JSON text; the first part of a call has its name and id."""

    index: int
    arguments: str = ""
    name: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """A part of an answer's text, in this order."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPart, ...] = ()

    def __add__(self, other: "Said") -> "Said":
        return Said(self.reasoning + other.reasoning, self.content + other.content, self.calls + other.calls)


class Splitter(Protocol):
    """feed() the text as it becomes certain, then finish()."""

    @property
    def inside(self) -> bool:
        """Whether the text so far ends within the thoughts."""
        ...

    @property
    def settled(self) -> bool:
        """Whether all that follows is content."""
        ...

    @property
    def called(self) -> bool:
        """After finish(): whether the answer ends with whole calls."""
        ...

    def feed(self, text: str) -> Said: ...

    def finish(self) -> Said: ...


class NoThoughts:
    """All text is content."""

    inside, settled, called = False, True, False

    def feed(self, text: str) -> Said:
        """The text as it is."""
        return Said(content=text)

    def finish(self) -> Said:
        """Nothing was held back."""
        return Said()


class Thoughts:
    """The newlines around both marks belong to neither side: templates that think put them there.

    before  "<think>\\n"  inside  "\\n</think>\\n\\n"  behind        `opened`: the prompt ends with the first mark
    """

    called = False

    def __init__(self, opened: bool) -> None:
        self._place: Literal["before", "inside", "behind"] = "inside" if opened else "before"
        self._fresh = opened  # newlines that come now are not part of the text
        self._pending = ""

    @property
    def inside(self) -> bool:
        return self._place == "inside"

    @property
    def settled(self) -> bool:
        return self._place == "behind"

    def feed(self, text: str) -> Said:
        """What became certain; what may still be a mark is held back."""
        self._pending += text
        if self._place == "before":
            self._look_for_open()
        reasoning = self._thought() if self._place == "inside" else ""
        content = self._take(len(self._pending)) if self._place == "behind" else ""
        return Said(reasoning, content)

    def finish(self) -> Said:
        """The rest, which holds no whole mark."""
        rest = self._take(len(self._pending))
        return Said(reasoning=rest) if self.inside else Said(content=rest)

    def _look_for_open(self) -> None:
        start = self._pending.lstrip()
        if start.startswith(OPEN):
            self._pending = start[len(OPEN) :]
            self._place, self._fresh = "inside", True
        elif not OPEN.startswith(start):
            self._place = "behind"

    def _thought(self) -> str:
        end = self._pending.find(CLOSE)
        if end < 0:
            return self._take(len(self._pending) - _hold_len(self._pending))
        text = self._take(end).rstrip("\n")
        self._pending = self._pending[len(CLOSE) :]
        self._place, self._fresh = "behind", True
        return text

    def _take(self, count: int) -> str:
        text, self._pending = self._pending[:count], self._pending[count:]
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        return text


def _hold_len(text: str) -> int:
    """Length of the longest tail that more text could make newlines and CLOSE."""
    size = next(size for size in reversed(range(len(CLOSE))) if text.endswith(CLOSE[:size]))
    return len(text) - len(text[: len(text) - size].rstrip("\n"))


def leaves_thoughts_open(prompt: Sequence[int], tokenizer: TextTokenizer) -> bool:
    """Whether the turn that a rendered prompt leaves open is already within its thoughts."""
    start = next((i + 1 for i in reversed(range(len(prompt))) if tokenizer.is_special(prompt[i])), 0)
    turn = tokenizer.decode(prompt[start:], show_special=False)
    return turn.rfind(OPEN) > turn.rfind(CLOSE)

"""Calls told from text: however the text comes in pieces, and wherever it is cut."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verdraft.server.thinking import NoThoughts, Said, Splitter, Thoughts
from verdraft.server.tool_calls import BareCalls, CallsAfterThoughts, ForcedCall, MarkedCalls, own_format

HEADS = {name: f'{{"name": "{name}", "arguments": ' for name in ("one", "on", "two")}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</x>"}}\n</tool_call>'


def told(splitter: Splitter, text: str, cuts: list[int]) -> tuple[str, str, dict[int, tuple[str, str]], bool]:
    """What is said, thought and called when the text comes in pieces."""
    said, place = Said(), 0
    for cut in [*sorted(cuts), len(text)]:
        said += splitter.feed(text[place:cut])
        place = max(place, cut)
    said += splitter.finish()
    calls: dict[int, tuple[str, str]] = {}
    for part in said.calls:
        assert bool(part.name) == bool(part.id) == (part.index not in calls)
        name, arguments = calls.get(part.index, (part.name, ""))
        calls[part.index] = (name, arguments + part.arguments)
    return said.content, said.reasoning, calls, splitter.called


pieces = st.lists(st.integers(0, 150), max_size=12)


@given(pieces, st.sampled_from(["one", "on", "two"]))
def test_a_forced_choice_is_a_name_and_arguments(cuts: list[int], name: str) -> None:
    arguments = '{"city": "Os}lo\\"", "n": [{}]}'
    text = HEADS[name] + arguments + "}"
    clipped = [min(cut, len(text)) for cut in cuts]
    assert told(ForcedCall(HEADS, "}"), text, clipped) == ("", "", {0: (name, arguments)}, True)


@given(pieces, st.integers(0, 60))
def test_a_cut_call_has_what_there_is_of_its_arguments(cuts: list[int], length: int) -> None:
    whole = HEADS["two"] + '{"a": {}}}'
    text = whole[:length]
    clipped = [min(cut, len(text)) for cut in cuts]
    content, _, calls, called = told(ForcedCall(HEADS, "}"), text, clipped)
    assert content == ""
    assert called == (length >= len(whole))
    if length >= len(HEADS["two"]):
        assert calls == {0: ("two", text[len(HEADS["two"]) :].removesuffix("}" if called else ""))}
    else:
        assert not calls


def test_a_named_call_is_all_arguments() -> None:
    assert told(ForcedCall({"f": ""}, ""), '{"a": 1}', [3]) == ("", "", {0: ("f", '{"a": 1}')}, True)
    assert told(ForcedCall({"f": ""}, ""), '{"a":', []) == ("", "", {0: ("f", '{"a":')}, False)


@given(pieces)
def test_marked_calls_stand_anywhere(cuts: list[int]) -> None:
    text = f"I <tool look.\n\n{CALL}\n{CALL}\n"
    clipped = [min(cut, len(text)) for cut in cuts]
    content, _, calls, called = told(MarkedCalls(), text, clipped)
    assert (content, called) == ("I <tool look.", True)
    assert [name for name, _ in calls.values()] == ["f", "f"]
    assert json.loads(calls[1][1]) == {"a": "</x>"}


@given(st.text("<tool_cal>/{} \n", max_size=40), pieces)
def test_what_is_no_call_stays_text(text: str, cuts: list[int]) -> None:
    clipped = [min(cut, len(text)) for cut in cuts]
    assert told(MarkedCalls(), text, clipped) == (text, "", {}, False)


@pytest.mark.parametrize("inner", ["", "{}", '{"name": 5}', '{"name": "f", "arguments": 3}', "{" * 5000, "[1]"])
def test_marked_nonsense_stays_text(inner: str) -> None:
    text = f"a <tool_call>{inner}</tool_call>"
    assert told(MarkedCalls(), text, [4]) == (text, "", {}, False)


def test_an_unfinished_marked_call_is_no_call() -> None:
    assert told(MarkedCalls(), CALL[:-3], []) == (CALL[:-3], "", {}, False)
    content, _, calls, called = told(MarkedCalls(), CALL + CALL[:-3], [])
    assert (content, len(calls), called) == (CALL[:-3], 1, False)


@given(pieces)
def test_bare_calls_are_the_whole_text(cuts: list[int]) -> None:
    text = '{"name": "f", "parameters": {"a": "b"}}; {"name": "g", "parameters": {}}'
    clipped = [min(cut, len(text)) for cut in cuts]
    assert told(BareCalls(), text, clipped) == ("", "", {0: ("f", '{"a": "b"}'), 1: ("g", "{}")}, True)
    assert told(BareCalls(), text[:-1], clipped) == (text[:-1], "", {}, False)
    assert told(BareCalls(), f"Well: {text}", clipped) == (f"Well: {text}", "", {}, False)


def test_thoughts_come_before_calls() -> None:
    splitter = CallsAfterThoughts(Thoughts(opened=True), MarkedCalls())
    text = f"so {CALL} it is\n</think>\n\n{CALL}"
    assert told(splitter, text, list(range(len(text)))) == (
        "", f"so {CALL} it is", {0: ("f", '{"a": "</x>"}')}, True
    )  # fmt: skip
    assert told(CallsAfterThoughts(NoThoughts(), BareCalls()), "hi", []) == ("hi", "", {}, False)


FORMATS: list[tuple[str, Callable[[], Splitter] | None]] = [
    ("{{ tools }} <tool_call> {{ x }} </tool_call>", MarkedCalls),
    ('{{ tools }} {"name": name, "parameters": x}', BareCalls),
    ("{{ messages }}", None),
]


@pytest.mark.parametrize(("template", "expected"), FORMATS)
def test_the_format_is_read_off_the_template(template: str, expected: Callable[[], Splitter] | None) -> None:
    assert own_format(template) is expected

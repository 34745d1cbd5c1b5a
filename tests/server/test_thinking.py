"""Thoughts and content, whatever the pieces in which the text comes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verdraft.server.thinking import Said, Thoughts, leaves_thoughts_open
from verdraft.server.tokenizer import TextTokenizer

pieces = st.lists(st.sampled_from(["<think>", "</think>", "<", "think>", "</th", "ink>", "/", "a", "\n", " "]))


def split(parts: list[str], opened: bool) -> Said:
    thoughts = Thoughts(opened)
    said = Said()
    for part in parts:
        said += thoughts.feed(part)
    return said + thoughts.finish()


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nhm\n\nso\n</think>\n\nyes\n", False, "hm\n\nso", "yes\n"),
        ("\n <think>hm</think> yes", False, "hm", " yes"),
        ("hm</think>\n\nyes <think>no</think>", True, "hm", "yes <think>no</think>"),
        ("no <think>x</think>", False, "", "no <think>x</think>"),
        ("<think>\n\n</think>\n\nyes", False, "", "yes"),
        ("<think>\nhm </thin", False, "hm </thin", ""),
        (" <thin", False, "", " <thin"),
        ("", True, "", ""),
    ],
)
def test_by_example(text: str, opened: bool, reasoning: str, content: str) -> None:
    assert split([text], opened) == Said(reasoning, content)


def defined(text: str, opened: bool) -> Said:
    """By looking at the whole text at once."""
    if not opened:
        if not text.lstrip().startswith("<think>"):
            return Said(content=text)
        text = text.lstrip().removeprefix("<think>")
    inside, mark, behind = text.partition("</think>")
    return Said(inside.strip("\n"), behind.lstrip("\n")) if mark else Said(inside.lstrip("\n"))


@given(pieces, st.booleans())
def test_the_pieces_do_not_matter(parts: list[str], opened: bool) -> None:
    text = "".join(parts)
    assert split(list(text), opened) == split(parts, opened) == split([text], opened) == defined(text, opened)


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|start|>assistant\n", False),
        ("<|start|>assistant\n<think>\n", True),
        ("<|start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|start|>user\n<think><|end|><|start|>assistant\n", False),
    ],
)
def test_where_the_prompt_leaves_off(byte_level_folder: Path, prompt: str, opened: bool) -> None:
    tokenizer = TextTokenizer(byte_level_folder)
    assert leaves_thoughts_open(tokenizer.encode(prompt, allow_special=True), tokenizer) == opened

"""Token texts join to the answer, and each stands at its offset."""

from hypothesis import given
from hypothesis import strategies as st

from verdraft.server.logprob_text import OutputTexts, PromptTexts
from verdraft.server.tokenizer import TextTokenizer

END, THINK = 260, 261  # of byte_level_folder


def walk(texts: OutputTexts, ids: list[int]) -> list[tuple[str, int]]:
    found = []
    for token in ids:
        found.append((texts.text(token), texts.offset))
        texts.advance(token)
    return found


@given(st.lists(st.integers(0, 258)))
def test_texts_join_to_the_text_at_their_offsets(byte_level: TextTokenizer, ids: list[int]) -> None:
    texts = walk(OutputTexts(byte_level, start=7), ids)
    joined = "".join(text for text, _ in texts)
    whole = byte_level.decode(ids, show_special=False)
    assert whole.startswith(joined)
    # What is unfinished at the very end is nobody's. It is one character, or what only looks like the start of one
    # (b"\xed\xa0" begins a surrogate), which decodes to one replacement per byte.
    assert whole[len(joined) :] in ("", "\ufffd", "\ufffd\ufffd")
    assert all(joined[offset - 7 :].startswith(text) for text, offset in texts)


@given(st.text())
def test_a_prompt_s_texts_join_to_the_prompt(byte_level: TextTokenizer, prompt: str) -> None:
    ids = byte_level.encode_prompt(prompt)
    assert "".join(text for text, _ in walk(PromptTexts(byte_level, prompt), ids)) == prompt


def test_special_and_invisible_tokens_take_no_room_in_the_output(byte_level: TextTokenizer) -> None:
    a = byte_level.encode("a", allow_special=False)[0]
    texts = OutputTexts(byte_level, invisible=frozenset([THINK]))
    assert walk(texts, [a, END, THINK, a]) == [("a", 0), ("<|end|>", 1), ("<think>", 1), ("a", 1)]


def test_special_tokens_written_out_in_a_prompt_take_room(byte_level: TextTokenizer) -> None:
    prompt = "a<|end|>b"
    found = walk(PromptTexts(byte_level, prompt), byte_level.encode_prompt(prompt))
    assert found == [("a", 0), ("<|end|>", 1), ("b", 8)]


def test_what_a_tokenizer_adds_before_a_prompt_takes_no_room(sentencepiece: TextTokenizer) -> None:
    ids = sentencepiece.encode_prompt("a b")
    assert walk(PromptTexts(sentencepiece, "a b"), ids) == [("<s>", 0), ("a", 0), (" ", 1), ("b", 2)]


def test_alternatives_are_read_at_the_same_place(byte_level: TextTokenizer) -> None:
    first, second = byte_level.encode("\u00e9", allow_special=False)
    texts = OutputTexts(byte_level)
    texts.advance(first)
    assert texts.text(second) == "\u00e9"
    assert texts.text(byte_level.encode("a", allow_special=False)[0]) == "\ufffda"

"""Text to ids and back, byte for byte, for both kinds of vocabulary."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verdraft.model.errors import ModelError
from verdraft.server.tokenizer import TextTokenizer

START, END, THINK = 259, 260, 261  # of byte_level_folder


@pytest.fixture(scope="module")
def demo(demo_path: Path) -> TextTokenizer:
    return TextTokenizer(demo_path)


def test_special_text_is_special_only_when_allowed(byte_level: TextTokenizer) -> None:
    text = "the<|end|> the"
    assert END in byte_level.encode(text, allow_special=True)
    literal = byte_level.encode(text, allow_special=False)
    assert END not in literal
    assert byte_level.decode(literal, show_special=False) == text


def test_added_tokens_that_mark_nothing_are_kept_in_literal_text(byte_level: TextTokenizer) -> None:
    literal = byte_level.encode("    <think>", allow_special=False)
    assert literal[0] == 263
    assert THINK not in literal


def test_special_tokens_have_no_bytes(byte_level: TextTokenizer) -> None:
    assert byte_level.token_bytes(END) is None
    assert byte_level.is_special(END)
    assert byte_level.token_text(END) == "<|end|>"
    assert byte_level.token_bytes(THINK) == b"<think>"
    assert not byte_level.is_special(THINK)


def test_every_byte_has_its_token(byte_level: TextTokenizer) -> None:
    assert {byte_level.token_bytes(token) for token in range(256)} == {bytes([byte]) for byte in range(256)}


def test_added_tokens_that_the_model_does_not_know_are_text(byte_level_folder: Path, tmp_path: Path) -> None:
    """A GPU that looks up an embedding that is none can do nothing any more."""
    for name, size in (("small", THINK), ("whole", 264)):
        folder = tmp_path / name
        shutil.copytree(byte_level_folder, folder)
        (folder / "config.json").write_text(json.dumps({"vocab_size": size}))
    small, whole = TextTokenizer(tmp_path / "small"), TextTokenizer(tmp_path / "whole")
    text = "<|end|><think>    the"
    assert THINK in whole.encode(text, allow_special=True)
    ids = small.encode(text, allow_special=True)
    assert ids[0] == END
    assert max(ids) < small.vocab_size == THINK
    assert small.decode(ids, show_special=True) == text


@given(st.text())
def test_round_trip(byte_level: TextTokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text, allow_special=False), show_special=True) == text


pieces = st.lists(st.sampled_from(["the", " t", "<|start|>", "<|end|>", "<think>", "    ", "\n", "\u00e9", "|>", "<|"]))


@given(pieces.map("".join))
def test_guarded_equals_plain_when_nothing_is_disguised(byte_level: TextTokenizer, text: str) -> None:
    assert byte_level.encode_guarded(text, {}) == byte_level.encode(text, allow_special=True)


@given(st.lists(st.sampled_from(["a", " a", "b", " ", "<s>", "</s>", "\u00e9"])).map("".join))
def test_guarded_equals_plain_with_a_first_space(sentencepiece: TextTokenizer, text: str) -> None:
    assert sentencepiece.encode_guarded(text, {}) == sentencepiece.encode(text, allow_special=True)


def test_guarded_text_is_restored_after_the_special_tokens_are_found(byte_level: TextTokenizer) -> None:
    ids = byte_level.encode_guarded("<|start|>\ue000|end|>", {0xE000: "<"})
    assert ids == [START, *byte_level.encode("<|end|>", allow_special=False)]


def test_sentencepiece_bytes(sentencepiece: TextTokenizer) -> None:
    ids = sentencepiece.encode("a b\U0001f600", allow_special=True)
    assert b"".join(sentencepiece.token_bytes(token) or b"" for token in ids) == " a b\U0001f600".encode()
    assert sentencepiece.token_bytes(3 + 0xF0) == b"\xf0"


def test_bos_comes_first_on_prompts_and_only_once(sentencepiece: TextTokenizer, byte_level: TextTokenizer) -> None:
    assert sentencepiece.encode_prompt("a") == [1, *sentencepiece.encode("a", allow_special=True)]
    assert sentencepiece.encode_prompt("<s>a").count(1) == 1
    assert sentencepiece.encode_prompt("") == []
    assert byte_level.encode_prompt("a") == byte_level.encode("a", allow_special=True)


def test_ids_without_a_text_are_empty(sentencepiece: TextTokenizer) -> None:
    assert sentencepiece.vocab_size == 300
    assert sentencepiece.token_bytes(299) is None
    assert sentencepiece.decode([299], show_special=True) == ""


def test_decode_is_lossy_and_shows_special_tokens_on_request(byte_level: TextTokenizer) -> None:
    ids = [*byte_level.encode("\u00e9", allow_special=False)[:1], END]
    assert byte_level.decode(ids, show_special=True) == "\ufffd<|end|>"
    assert byte_level.decode(ids, show_special=False) == "\ufffd"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        TextTokenizer(tmp_path)


@pytest.mark.demo
def test_demo_special_text(demo: TextTokenizer) -> None:
    assert demo.encode_prompt("<|im_end|>") == [2]
    assert 2 not in demo.encode("a<|im_end|>", allow_special=False)
    assert demo.vocab_size == 49152


@pytest.mark.demo
def test_demo_bytes_equal_the_library_s_decode(demo: TextTokenizer) -> None:
    text = "Hello, world! \u00dcn\u00efc\u00f6d\u00e9 \u2014 na\u00efve.\n\tdef f(x): return x 12345 \U0001f600"
    ids = demo.encode(text, allow_special=True)
    assert demo.decode(ids, show_special=True) == text


@given(text=st.text() | st.text(alphabet="the <|start>\u00e9") | st.just("<|start|>" * 9))
def test_the_lower_bound_is_one(byte_level: TextTokenizer, sentencepiece: TextTokenizer, text: str) -> None:
    for tokenizer in (byte_level, sentencepiece):
        for special in (True, False):
            assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, allow_special=special))


def test_the_lower_bound_says_something_where_it_can(byte_level_folder: Path, tmp_path: Path) -> None:
    assert TextTokenizer(byte_level_folder).least_tokens("x" * 900) == 100  # the longest is <|start|>
    spec = json.loads((byte_level_folder / "tokenizer.json").read_text())
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "_"}
    sequence = {"type": "Sequence", "normalizers": [{"type": "NFC"}, replace]}
    for normalizer, least in ((sequence, 100), ({**replace, "content": ""}, 0), ({"type": "Lowercase"}, 0)):
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec | {"normalizer": normalizer}))
        assert TextTokenizer(tmp_path).least_tokens("x" * 900) == least
    assert TextTokenizer(byte_level_folder).least_tokens("e\u0301" * 900) == 0  # may be composed to half as many

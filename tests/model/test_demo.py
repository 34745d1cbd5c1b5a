"""The demo model: its tokenizer, its chat template, and that it makes sense."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from verdraft.model.config import read_config

pytestmark = pytest.mark.demo

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


@pytest.fixture(scope="module")
def tokenizer(demo_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_path)


def render(tokenizer: Any, *roles: str) -> str:
    messages = [{"role": role, "content": "Hi"} for role in roles]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def test_config(demo_path: Path) -> None:
    config = read_config(demo_path)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.max_model_len, config.eos_token_ids) == (49152, 8192, {2})
    assert (config.rope_theta, config.norm_eps, config.tied_head) == (100000.0, 1e-5, True)


@pytest.mark.parametrize(
    "text", ["1 2 3 4 5", "x = 12345;", "Hello  world\n\n\tfoo", "  lead", "é漢字🙂", "don't I'LL", "<|im_end|>a"]
)
def test_text_round_trips(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokens(tokenizer: Any) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12 345")) == ["1", "2", "Ġ", "3", "4", "5"]
    assert tokenizer.encode("<|im_start|>user<|im_end|>")[::2] == [1, 2]
    assert tokenizer.encode("Hello") == [19556]  # no BOS
    assert len(tokenizer) == 49152
    assert all(tokenizer.added_tokens_decoder[index].special for index in range(17))


def test_the_system_turn_is_added_exactly_when_missing(tokenizer: Any) -> None:
    turn = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(tokenizer, "user") == SYSTEM + turn
    assert render(tokenizer, "system", "user") == "<|im_start|>system\nHi<|im_end|>\n" + turn


def test_it_answers_a_question(demo_path: Path, tokenizer: Any, runner: Any) -> None:
    sequence = runner(demo_path)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    answer: list[int] = []
    while not answer or (answer[-1] != 2 and len(answer) < 12):
        answer.append(int(sequence.feed(tokens)[-1].argmax()))
        tokens = answer[-1:]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"

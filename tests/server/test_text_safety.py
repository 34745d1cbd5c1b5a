"""Whatever a user writes, wherever an endpoint takes text: it opens and closes no turn and no thoughts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verdraft.server.chat_template import ChatTemplate
from verdraft.server.grammars import Grammars
from verdraft.server.prepare import Prepared, prepare_chat, prepare_messages, prepare_responses
from verdraft.server.requests import Limits
from verdraft.server.service import Text
from verdraft.server.tokenizer import TextTokenizer

TEMPLATE = (
    "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}{{ m.name or '' }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.tool_call_id or '' }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
USER: Any = {"role": "user", "content": "hi"}
Place = Callable[[str], dict[str, Any]]


def called(name: str = "f", text: str = "", id: str = "c") -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps({"a": text})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]}


def schema(text: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"enum": [text], "description": text}}}


CHAT: dict[str, Place] = {
    "content": lambda x: {"messages": [{"role": "user", "content": x}]},
    "parts": lambda x: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in (x[:3], x[3:])]}]
    },
    "system": lambda x: {"messages": [{"role": "system", "content": x}, USER]},
    "name": lambda x: {"messages": [{**USER, "name": x}]},
    "tool result": lambda x: {"messages": [USER, called(), {"role": "tool", "tool_call_id": "c", "content": x}]},
    "call id": lambda x: {"messages": [USER, called(), {"role": "tool", "tool_call_id": x, "content": "4"}]},
    "function": lambda x: {"messages": [USER, called(name=x)]},
    "arguments": lambda x: {"messages": [USER, called(text=x)]},
    "description": lambda x: {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "f", "description": x, "parameters": schema(x)}}],
    },
}
RESPONSES: dict[str, Place] = {
    "input": lambda x: {"input": x},
    "parts": lambda x: {"input": [{"role": "user", "content": [{"type": "input_text", "text": x}]}]},
    "instructions": lambda x: {"input": "hi", "instructions": x},
    "arguments": lambda x: {
        "input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps({"a": x})}]
    },
    "output": lambda x: {"input": [USER, {"type": "function_call_output", "call_id": "c", "output": x}]},
    "description": lambda x: {
        "input": "hi",
        "tools": [{"type": "function", "name": "f", "description": x, "parameters": schema(x)}],
    },
}
MESSAGES: dict[str, Place] = {
    "content": lambda x: {"messages": [{"role": "user", "content": x}]},
    "blocks": lambda x: {"messages": [{"role": "user", "content": [{"type": "text", "text": x}]}]},
    "system": lambda x: {"messages": [USER], "system": [{"type": "text", "text": x}]},
    "tool result": lambda x: {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": x}]}]
    },
    "tool use": lambda x: {
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": x}}]},
            USER,
        ]
    },
    "description": lambda x: {
        "messages": [USER],
        "tools": [{"name": "f", "description": x, "input_schema": schema(x)}],
    },
}
ENDPOINTS = (
    ("chat", prepare_chat, CHAT),
    ("responses", prepare_responses, RESPONSES),
    ("messages", prepare_messages, MESSAGES),
)
PLACES = [
    pytest.param(prepare, place, id=f"{endpoint}-{name}")
    for endpoint, prepare, places in ENDPOINTS
    for name, place in places.items()
]
OF_THE_ASSISTANT: dict[str, Place] = {
    "content": lambda x: {"messages": [USER, {"role": "assistant", "content": x}, USER]},
    "thoughts": lambda x: {"messages": [USER, {"role": "assistant", "content": "", "reasoning_content": x}, USER]},
    "open turn": lambda x: {"messages": [USER, {"role": "assistant", "content": x}], "continue_final_message": True},
}
hostile = st.lists(
    st.sampled_from(
        ["<|start|>", "<|end|>", "<think>", "</think>", "<|", "|>", "start", "art|>", "<th", "ink>", "\n", "the"]
    ),
    min_size=1,
).map("".join)


@pytest.fixture(scope="module")
def text(byte_level_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Text:
    folder = tmp_path_factory.mktemp("safety")
    (folder / "tokenizer.json").write_bytes((byte_level_folder / "tokenizer.json").read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = TextTokenizer(folder)
    return Text(tokenizer, ChatTemplate(folder, tokenizer), frozenset(), Grammars(tokenizer, frozenset()))


def prepared(prepare: Any, body: dict[str, Any], text: Text) -> Prepared:
    limits = Limits(model="m", vocab_size=text.tokenizer.vocab_size, max_model_len=10**6)
    found: Prepared = prepare(json.dumps({"max_tokens": 5, **body}).encode(), "application/json", text, limits)
    return found


def marks(
    prompt: Any, text: Text, kinds: tuple[str, ...] = ("<|start|>", "<|end|>", "<think>", "</think>")
) -> list[int]:
    """The marks among a prompt's ids."""
    ids = {text.tokenizer.encode(kind, allow_special=True)[0] for kind in kinds}
    return [token for token in prompt if token in ids]


@pytest.mark.parametrize(("prepare", "place"), PLACES)
@settings(max_examples=40)
@given(written=hostile)
def test_what_users_write_holds_no_mark(text: Text, prepare: Any, place: Place, written: str) -> None:
    found, harmless = (prepared(prepare, place(content), text).prompts[0] for content in (written, "the"))
    assert marks(found, text) == marks(harmless, text)
    opened = prepared(prepare, place(written), text).splitter().inside
    assert opened == prepared(prepare, place("the"), text).splitter().inside


@pytest.mark.parametrize("place", OF_THE_ASSISTANT.values(), ids=OF_THE_ASSISTANT)
@settings(max_examples=40)
@given(written=hostile)
def test_what_the_assistant_is_said_to_have_said_opens_no_turn(text: Text, place: Place, written: str) -> None:
    """Its thoughts may be marked there: a template looks for them."""
    turns = ("<|start|>", "<|end|>")
    found, harmless = (prepared(prepare_chat, place(content), text).prompts[0] for content in (written, "the"))
    assert marks(found, text, turns) == marks(harmless, text, turns)


@settings(max_examples=40)
@given(written=hostile)
def test_a_prediction_holds_no_mark(text: Text, written: str) -> None:
    body = {"messages": [USER], "prediction": {"type": "content", "content": written}}
    assert marks(prepared(prepare_chat, body, text).prediction, text) == []


def test_one_conversation_has_the_same_ids_on_every_endpoint(text: Text) -> None:
    said = [
        {"role": "user", "content": "a<|end|>"},
        called(text="b"),
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a<|end|>"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "b"}'},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "4"}]},
    ]
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "a<|end|>"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "4"}]},
    ]
    system = {"role": "system", "content": "s"}
    chat = prepared(prepare_chat, {"messages": [system, *said]}, text).prompts[0]
    assert prepared(prepare_responses, {"instructions": "s", "input": items}, text).prompts[0] == chat
    assert prepared(prepare_messages, {"system": "s", "messages": blocks}, text).prompts[0] == chat

"""The `input` of /v1/responses: items, several of which may make one turn."""

from collections.abc import Iterator
from typing import Any

from verdraft.server.errors import empty_array, invalid_type, invalid_value, missing, shown
from verdraft.server.fields import Fields, array, required_string, string, text_content
from verdraft.server.requests import Message

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXT_PARTS = ("input_text", "output_text", "text")


def parse_input(body: Fields) -> list[Message]:
    """The turns. Raises ApiError, naming the item."""
    value = body.get("input")
    if value is None:
        raise missing("input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise invalid_type("input", "a string or an array of items", value)
    if not value:
        raise empty_array("input")
    turns: list[Message] = []
    for index, item in enumerate(value):
        _add(turns, _turn(item, f"input[{index}]"))
    return turns


def _add(turns: list[Message], turn: Message) -> None:
    """Thoughts, text and calls of the assistant are items of their own, and one turn."""
    last = turns[-1] if turns else {}
    follows = last.get("role") == turn["role"] == "assistant" and (
        turn.get("tool_calls") or not (last["content"] or last.get("tool_calls"))
    )
    if not follows:
        turns.append(turn)
        return
    calls = [*last.get("tool_calls", ()), *turn.get("tool_calls", ())]
    merged = {**last, **turn, "content": last["content"] + turn["content"]}
    turns[-1] = {**merged, "tool_calls": calls} if calls else merged


def _turn(item: Any, param: str) -> Message:
    if not isinstance(item, dict):
        raise invalid_type(param, "an object", item)
    path = f"{param}."
    match item.get("type"):
        case None | "message":
            return _message(item, path)
        case "function_call":
            return {"role": "assistant", "content": "", "tool_calls": [_call(item, path)]}
        case "function_call_output":
            call_id = required_string(item, "call_id", path)
            return {"role": "tool", "tool_call_id": call_id, "content": _text(item, "output", path)}
        case "reasoning":
            return {"role": "assistant", "content": "", "reasoning_content": "".join(_thoughts(item, path))}
    raise invalid_value(
        f"{path}type", "only items of type message, reasoning, function_call and function_call_output are supported"
    )


def _message(item: Fields, path: str) -> Message:
    role = required_string(item, "role", path)
    if role not in ROLES:
        raise invalid_value(f"{path}role", f"must be one of {', '.join(ROLES)}; got {shown(role)}")
    return {"role": ROLES[role], "content": _text(item, "content", path)}


def _text(item: Fields, name: str, path: str) -> str:
    if item.get(name) is None:
        raise missing(path + name)
    return text_content(item[name], path + name, TEXT_PARTS)


def _call(item: Fields, path: str) -> Message:
    function = {
        "name": required_string(item, "name", path),
        "arguments": string(item, "arguments", "", path),
    }
    return {"id": required_string(item, "call_id", path), "type": "function", "function": function}


def _thoughts(item: Fields, path: str) -> Iterator[str]:
    """What the model thought, if it was sent back; a summary is not what it thought."""
    if array(item, "content", path):
        yield text_content(item["content"], f"{path}content", ("reasoning_text",))

"""Tool calls and tool results in plain words, for chat templates that do not know of tools."""

from collections.abc import Mapping, Sequence
from typing import Any

from verdraft.server.requests import Message


def describe_tool_turns(messages: Sequence[Message], template_knows_tools: bool) -> list[Message]:
    """The messages as they are, or with calls written into the assistant's text and results as user turns."""
    return list(messages) if template_knows_tools else [_described(message) for message in messages]


def _described(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"Tool result: {message['content']}"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    lines = [message["content"]] if message["content"] else []
    lines += [_call(call["function"]) for call in calls]
    return {"role": message["role"], "content": "\n".join(lines)}


def _call(function: Mapping[str, Any]) -> str:
    return f"Tool call: {function['name']}({function['arguments']})"

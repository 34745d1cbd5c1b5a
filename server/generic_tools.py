"""Tool calls and tool results in plain words, for chat templates that do not know of tools."""

import json
from collections.abc import Iterator, Mapping, Sequence
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


def describe_forced(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages after a word in the system turn about the functions of which the answer will call one."""
    text = "\n".join(_description(tools))
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]


def _description(tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if len(tools) == 1:
        yield "Call this function: answer with its arguments in JSON and nothing else."
    else:
        yield 'Call one of these functions: answer with {"name": ..., "arguments": ...} and nothing else.'
    for tool in tools:
        function = tool["function"]
        said = f": {function['description']}" if function.get("description") else ""
        yield f"{function['name']}{said}"
        yield f"Arguments: {json.dumps(function.get('parameters') or {}, ensure_ascii=False)}"

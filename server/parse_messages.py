"""The body of /v1/messages: Anthropic's fields, read as the chat request that they mean. Nothing is stored."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from verdraft.server.errors import empty_array, invalid_type, invalid_value, missing, shown, unsupported_parameter
from verdraft.server.fields import (
    Fields,
    array,
    boolean,
    number,
    obj,
    only,
    part_text,
    required_string,
    string,
    text_content,
)
from verdraft.server.json_form import JsonForm, Place
from verdraft.server.jsonbody import dump
from verdraft.server.parse_chat import forced_tools, form_of_answer, offered_tools, parse_variables
from verdraft.server.parse_common import EXTENSIONS, parse_max_tokens, parse_model, parse_options, parse_stop
from verdraft.server.requests import ChatPrompt, ChatRequest, GenerationOptions, Limits, Message
from verdraft.server.thinking import THINKING_SWITCH

ROLES = ("user", "assistant", "system")
THINKING = ("adaptive", "disabled")
UNSUPPORTED = ("container", "mcp_servers", "context_management")  # they would change the answer


def parse_messages_body(body: Fields, limits: Limits) -> ChatRequest:
    """Raises ApiError for the first thing that is wrong."""
    model = parse_model(body, limits)
    prompt = parse_messages_prompt(body)
    form = form_of_answer(_format(body), prompt)
    return ChatRequest(model=model, prompt=prompt, options=_options(body, limits), form=form)


def parse_messages_prompt(body: Fields) -> ChatPrompt:
    """What the template renders; `/v1/messages/count_tokens` reads the same fields.

    A last turn of the assistant is its answer's beginning, as this API has it.
    """
    for name in UNSUPPORTED:
        if body.get(name) not in (None, []):
            raise unsupported_parameter(name)
    messages = (*_system(body), *_messages(body))
    continued = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    tools = {"tools": _tools(body), "tool_choice": _tool_choice(body)}
    return ChatPrompt(
        messages=messages,
        tools=offered_tools(tools),
        forced=forced_tools(tools),
        add_generation_prompt=not continued,
        continue_final_message=continued,
        no_thoughts=_no_thoughts(body),
        variables=parse_variables(body),
    )


def _format(body: Fields) -> JsonForm | None:
    form = obj(obj(body, "output_config") or {}, "format", "output_config.")
    if form is None:
        return None
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise invalid_value("output_config.format", "must be of type json_schema, with an object schema")
    return JsonForm("output_config.format", (Place("output_config.format.schema", form["schema"]),))


def _no_thoughts(body: Fields) -> bool:
    thinking = obj(body, "thinking")
    kind = "adaptive" if thinking is None else thinking.get("type")
    if kind not in THINKING:
        message = "'thinking' may only be of type adaptive or disabled: how long to think is the model's own decision"
        raise unsupported_parameter("thinking", message)
    if kind == "disabled" and THINKING_SWITCH in parse_variables(body):
        raise invalid_value(f"chat_template_kwargs.{THINKING_SWITCH}", "the field 'thinking' says this")
    return kind == "disabled"


def _options(body: Fields, limits: Limits) -> GenerationOptions:
    number(body, "temperature", 1.0, 0, 1)  # a narrower range than elsewhere
    user = obj(body, "metadata") or {}
    string(user, "user_id", None, "metadata.")
    max_tokens = parse_max_tokens(body, "max_tokens", None, 1)
    if max_tokens is None:
        raise missing("max_tokens")
    options = parse_options(only(body, EXTENSIONS), limits, max_tokens=max_tokens, logprobs=None)
    array(body, "stop_sequences")  # no string stands for an array here
    return replace(options, stop=parse_stop(body, "stop_sequences"))


def _system(body: Fields) -> Iterator[Message]:
    if body.get("system") not in (None, ""):
        yield {"role": "system", "content": text_content(body["system"], "system")}


def _messages(body: Fields) -> Iterator[Message]:
    value = array(body, "messages")
    if value is None:
        raise missing("messages")
    if not value:
        raise empty_array("messages")
    for index, entry in enumerate(value):
        yield from _turn(entry, f"messages[{index}]")


def _turn(entry: Any, param: str) -> Iterator[Message]:
    if not isinstance(entry, dict):
        raise invalid_type(param, "an object", entry)
    role = required_string(entry, "role", f"{param}.")
    if role not in ROLES:
        raise invalid_value(f"{param}.role", f"must be one of {', '.join(ROLES)}; got {shown(role)}")
    content = entry.get("content")
    if content is None:
        raise missing(f"{param}.content")
    if role == "system" or isinstance(content, str):
        yield {"role": role, "content": text_content(content, f"{param}.content")}
        return
    if not isinstance(content, list):
        raise invalid_type(f"{param}.content", "a string or an array of content blocks", content)
    if not content:
        raise empty_array(f"{param}.content")
    blocks = [(block, f"{param}.content[{index}]") for index, block in enumerate(content)]
    yield from [_assistant(blocks)] if role == "assistant" else _user(blocks)


def _user(blocks: list[tuple[Any, str]]) -> Iterator[Message]:
    """Results of tools are turns of their own; texts between them are joined."""
    texts: list[str] = []
    for block, param in blocks:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            if texts:
                yield {"role": "user", "content": "".join(texts)}
                texts = []
            yield _tool_result(block, param)
        else:
            texts.append(part_text(block, param))
    if texts:
        yield {"role": "user", "content": "".join(texts)}


def _tool_result(block: Fields, param: str) -> Message:
    boolean(block, "is_error", path=f"{param}.")
    content = block.get("content")
    text = "" if content in (None, []) else text_content(content, f"{param}.content")
    return {"role": "tool", "tool_call_id": required_string(block, "tool_use_id", f"{param}."), "content": text}


def _assistant(blocks: list[tuple[Any, str]]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Message] = []
    for block, param in blocks:
        match block.get("type") if isinstance(block, dict) else None:
            case "tool_use":
                calls.append(_tool_use(block, f"{param}."))
            case "thinking":
                thoughts.append(string(block, "thinking", "", f"{param}."))
            case "redacted_thinking":
                pass  # nobody here can read it
            case _:
                texts.append(part_text(block, param))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    thought = {"reasoning_content": "".join(thoughts)} if thoughts else {}
    return {**message, **thought, **({"tool_calls": calls} if calls else {})}


def _tool_use(block: Fields, path: str) -> Message:
    arguments = dump(obj(block, "input", path) or {}).decode()
    function = {"name": required_string(block, "name", path), "arguments": arguments}
    return {"id": required_string(block, "id", path), "type": "function", "function": function}


def _tools(body: Fields) -> list[Fields]:
    """In the form of chat completions."""
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(array(body, "tools") or ())]


def _tool(tool: Any, param: str) -> Fields:
    if not isinstance(tool, dict):
        raise invalid_type(param, "an object", tool)
    kind = string(tool, "type", "custom", f"{param}.")
    if kind != "custom":
        raise invalid_value(f"{param}.type", f'must be "custom"; got {shown(kind)}')
    name = required_string(tool, "name", f"{param}.")
    description = string(tool, "description", None, f"{param}.")
    schema = obj(tool, "input_schema", f"{param}.")
    if schema is None:
        raise missing(f"{param}.input_schema")
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def _tool_choice(body: Fields) -> Any:
    """In the form of chat completions."""
    choice = obj(body, "tool_choice")
    if choice is None:
        return None
    match choice.get("type"):
        case "auto" | "none" as kind:
            return kind
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": required_string(choice, "name", "tool_choice.")}}
    raise invalid_value("tool_choice", "the type must be auto, any, tool or none")

"""The body of /v1/chat/completions (HTTP contract, sections 4 and 11): messages, tools, the form of the answer."""

from typing import Any

from verdraft.server.errors import (
    empty_array,
    invalid_type,
    invalid_value,
    missing,
    shown,
)
from verdraft.server.fields import Fields, array, boolean, integer, obj, required_string, string, text_content
from verdraft.server.json_form import ANY_OBJECT, JsonForm, Place, forced_call
from verdraft.server.parse_common import parse_max_tokens, parse_model, parse_options
from verdraft.server.requests import ChatPrompt, ChatRequest, Limits, Message

MAX_TOP_LOGPROBS = 20
ROLES = ("system", "developer", "user", "assistant", "tool")
OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")
OPTIONAL_TEXTS = ("name", "refusal", "reasoning_content", "tool_call_id")


def parse_chat(body: Fields, limits: Limits) -> ChatRequest:
    """Raises ApiError for the first thing that is wrong."""
    model = parse_model(body, limits)
    prompt = parse_chat_prompt(body)
    options = parse_options(body, limits, max_tokens=_max_tokens(body), logprobs=_logprobs(body))
    form = form_of_answer(parse_response_format(body), prompt)
    return ChatRequest(model=model, prompt=prompt, options=options, form=form)


def form_of_answer(form: JsonForm | None, prompt: ChatPrompt) -> JsonForm | None:
    """`form` is what the request asks for by itself; None: any text."""
    if not prompt.forced:
        return form
    if form:
        raise invalid_value(form.param, "not possible together with a forced tool call")
    return forced_call(prompt.forced)


def parse_chat_prompt(body: Fields) -> ChatPrompt:
    """What the template renders; `/tokenize` reads the same fields."""
    messages = parse_messages(body)
    continued = boolean(body, "continue_final_message")
    generation = boolean(body, "add_generation_prompt", default=not continued)
    if continued and generation:
        raise invalid_value("continue_final_message", "not possible together with add_generation_prompt")
    if continued and (messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls")):
        raise invalid_value("continue_final_message", "the last message must be an assistant message with text")
    return ChatPrompt(
        messages=messages,
        tools=offered_tools(body),
        forced=forced_tools(body),
        add_generation_prompt=generation,
        continue_final_message=continued,
        variables=parse_variables(body),
    )


def parse_variables(body: Fields) -> Fields:
    """`chat_template_kwargs`, as vLLM and llama.cpp have it: switches of a model's template, plain values only."""
    values = obj(body, "chat_template_kwargs") or {}
    for name, value in values.items():
        if name in OWN_VARIABLES:
            raise invalid_value(f"chat_template_kwargs.{name}", "the request's own fields say this")
        if not isinstance(value, bool | int | float | str | None):
            raise invalid_type(f"chat_template_kwargs.{name}", "true, false, null, a number or a string", value)
    return values


def _max_tokens(body: Fields) -> int | None:
    old = parse_max_tokens(body, "max_tokens", None, 1)
    new = parse_max_tokens(body, "max_completion_tokens", None, 1)
    return old if new is None else new


def _logprobs(body: Fields) -> int | None:
    wanted = boolean(body, "logprobs")
    top = integer(body, "top_logprobs", None, 0, MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise invalid_value("top_logprobs", "needs logprobs: true")
    return (top or 0) if wanted else None


def parse_messages(body: Fields) -> tuple[Message, ...]:
    """Messages whose content is a str; roles are system, user, assistant and tool."""
    value = array(body, "messages")
    if value is None:
        raise missing("messages")
    if not value:
        raise empty_array("messages")
    return tuple(_message(entry, f"messages[{index}]") for index, entry in enumerate(value))


def _message(entry: Any, param: str) -> Message:
    if not isinstance(entry, dict):
        raise invalid_type(param, "an object", entry)
    role = _role(entry, f"{param}.")
    calls = parse_tool_calls(entry, f"{param}.") if role == "assistant" else ()
    texts = {name: string(entry, name, None, f"{param}.") for name in OPTIONAL_TEXTS}
    message = {"role": role, "content": _content(entry, f"{param}.content", optional=bool(calls))}
    message |= {name: text for name, text in texts.items() if text is not None}
    return message | ({"tool_calls": list(calls)} if calls else {})


def _role(entry: Fields, path: str) -> str:
    role = required_string(entry, "role", path)
    if role not in ROLES:
        raise invalid_value(f"{path}role", f"must be one of {', '.join(ROLES)}; got {shown(role)}")
    return "system" if role == "developer" else role


def _content(entry: Fields, param: str, optional: bool) -> str:
    value = entry.get("content")
    if value is not None:
        return text_content(value, param)
    if optional:
        return ""
    if "content" in entry:
        raise invalid_type(param, "a string or an array of text parts", None)
    raise missing(param)


def parse_tool_calls(entry: Fields, path: str) -> tuple[Message, ...]:
    """`tool_calls` of an assistant message. The arguments stay text: nothing asks that they are JSON."""
    value = array(entry, "tool_calls", path) or []
    return tuple(_tool_call(call, f"{path}tool_calls[{index}]") for index, call in enumerate(value))


def _tool_call(call: Any, param: str) -> Message:
    if not isinstance(call, dict):
        raise invalid_type(param, "an object", call)
    _check_function_type(call, param)
    function = obj(call, "function", f"{param}.")
    if function is None:
        raise missing(f"{param}.function")
    name = required_string(function, "name", f"{param}.function.")
    arguments = string(function, "arguments", "", f"{param}.function.")
    identity = string(call, "id", "", f"{param}.")
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _check_function_type(entry: Fields, param: str) -> None:
    kind = string(entry, "type", "function", f"{param}.")
    if kind != "function":
        raise invalid_value(f"{param}.type", f'must be "function"; got {shown(kind)}')


def parse_tools(body: Fields) -> list[Fields] | None:
    """The tools as the client gave them; None without any."""
    tools = array(body, "tools")
    if not tools:
        return None
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    return tools


def _check_tool(tool: Any, param: str) -> None:
    if not isinstance(tool, dict):
        raise invalid_type(param, "an object", tool)
    if tool.get("type") is None:
        raise missing(f"{param}.type")
    _check_function_type(tool, param)
    function = obj(tool, "function", f"{param}.")
    if function is None:
        raise missing(f"{param}.function")
    required_string(function, "name", f"{param}.function.")
    string(function, "description", None, f"{param}.function.")
    obj(function, "parameters", f"{param}.function.")
    boolean(function, "strict", path=f"{param}.function.")


def parse_tool_choice(body: Fields) -> str | None:
    """None, "none", "auto", "required", or "function" for a named one."""
    tools = parse_tools(body) or ()
    value = body.get("tool_choice")
    if value is None or value in ("none", "auto"):
        return value
    if value == "required":
        if not tools:
            raise invalid_value("tool_choice", '"required" needs tools')
        return "required"
    if not isinstance(value, dict):
        raise invalid_value("tool_choice", 'must be "none", "auto", "required" or a named function')
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if value.get("type") != "function" or not isinstance(name, str):
        raise invalid_value("tool_choice", 'must be {"type": "function", "function": {"name": ...}}')
    if name not in [tool["function"]["name"] for tool in tools]:
        raise invalid_value("tool_choice", f"there is no tool named {shown(name)}")
    return "function"


def offered_tools(body: Fields) -> list[Fields] | None:
    """What the template shows the model."""
    return None if parse_tool_choice(body) == "none" else parse_tools(body)


def forced_tools(body: Fields) -> list[Fields]:
    """Of which the answer must call one: all, or the first of the name that was asked for; mostly none."""
    tools = parse_tools(body) or []
    match parse_tool_choice(body):
        case "required":
            return tools
        case "function":
            name = body["tool_choice"]["function"]["name"]
            return [tool for tool in tools if tool["function"]["name"] == name][:1]
    return []


def parse_response_format(body: Fields) -> JsonForm | None:
    """None: text."""
    value = obj(body, "response_format")
    if value is None or value.get("type") == "text":
        return None
    if value.get("type") == "json_object":
        return JsonForm("response_format", (Place("response_format", ANY_OBJECT),))
    if value.get("type") == "json_schema":
        return JsonForm("response_format", (_json_schema(value.get("json_schema")),))
    raise invalid_value("response_format", "the type must be text, json_object or json_schema")


def _json_schema(value: Any) -> Place:
    if not isinstance(value, dict):
        raise invalid_value("response_format", "the type json_schema needs the object json_schema")
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise invalid_value("response_format", "json_schema.name must be a string")
    if not isinstance(value.get("schema"), dict):
        raise invalid_value("response_format", "json_schema.schema must be an object")
    boolean(value, "strict", path="response_format.json_schema.")
    return Place("json_schema.schema", value["schema"])

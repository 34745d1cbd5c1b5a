"""The body of /v1/responses: OpenAI's fields, read as the chat request that they mean. Nothing is stored.

What depends on earlier responses, and whatever runs elsewhere than in the model, gets a 400 that names the field.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from verdraft.server.errors import invalid_type, invalid_value, missing, shown, unsupported_parameter
from verdraft.server.fields import Fields, array, boolean, integer, obj, only, required_string, string
from verdraft.server.json_form import ANY_OBJECT, JsonForm, Place
from verdraft.server.parse_chat import (
    MAX_TOP_LOGPROBS,
    forced_tools,
    form_of_answer,
    offered_tools,
    parse_variables,
)
from verdraft.server.parse_common import EXTENSIONS, check_metadata, parse_max_tokens, parse_model, parse_options
from verdraft.server.requests import ChatPrompt, ChatRequest, GenerationOptions, Limits
from verdraft.server.responses_input import parse_input

UNSUPPORTED = ("previous_response_id", "conversation", "prompt", "context_management")
LOGPROBS = "message.output_text.logprobs"  # the one thing that `include` can ask for


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """POST /v1/responses. `shown` are the fields that the response object repeats."""

    chat: ChatRequest
    shown: Mapping[str, Any]


def parse_responses_body(body: Fields, limits: Limits) -> ResponsesRequest:
    """Raises ApiError for the first thing that is wrong."""
    _refuse_unsupported(body)
    model = parse_model(body, limits)
    instructions = string(body, "instructions", "")
    system = [{"role": "system", "content": instructions}] if instructions else []
    tools = {"tools": _tools(body), "tool_choice": _tool_choice(body)}
    prompt = ChatPrompt(
        messages=(*system, *parse_input(body)),
        tools=offered_tools(tools),
        forced=forced_tools(tools),
        variables=parse_variables(body),
    )
    options = _options(body, limits)
    chat = ChatRequest(model=model, prompt=prompt, options=options, form=form_of_answer(_format(body), prompt))
    return ResponsesRequest(chat, _shown(body, options))


def _refuse_unsupported(body: Fields) -> None:
    for name in UNSUPPORTED:
        if body.get(name) not in (None, [], 0):
            raise unsupported_parameter(name)
    if boolean(body, "background"):
        raise unsupported_parameter("background", "'background' is not supported: nothing is kept")
    if boolean(body, "store"):
        raise unsupported_parameter("store", "'store' is not supported: nothing is kept")
    if string(body, "truncation", "disabled") != "disabled":
        raise unsupported_parameter("truncation", "'truncation' may only be \"disabled\": nothing is cut from an input")
    obj(body, "reasoning")


def _format(body: Fields) -> JsonForm | None:
    form = obj(obj(body, "text") or {}, "format", "text.") or {"type": "text"}
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return JsonForm("text.format", (Place("text.format", ANY_OBJECT),))
        case "json_schema":
            required_string(form, "name", "text.format.")
            boolean(form, "strict", path="text.format.")
            schema = obj(form, "schema", "text.format.")
            if schema is None:
                raise missing("text.format.schema")
            return JsonForm("text.format", (Place("text.format.schema", schema),))
    raise invalid_value("text.format", "the type must be text, json_object or json_schema")


def _options(body: Fields, limits: Limits) -> GenerationOptions:
    check_metadata(body)
    max_tokens = parse_max_tokens(body, "max_output_tokens", None, 1)
    options = parse_options(only(body, (*EXTENSIONS, "stop")), limits, max_tokens=max_tokens, logprobs=_logprobs(body))
    stream_options = obj(body, "stream_options") or {}
    boolean(stream_options, "include_obfuscation", path="stream_options.")
    return replace(options, include_usage=True)


def _logprobs(body: Fields) -> int | None:
    included = array(body, "include") or []
    if any(entry != LOGPROBS for entry in included):
        raise unsupported_parameter("include", f"'include' may only ask for {LOGPROBS}")
    top = integer(body, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
    if top and not included:
        raise invalid_value("top_logprobs", f'needs include: ["{LOGPROBS}"]')
    return top if included else None


def _shown(body: Fields, options: GenerationOptions) -> Mapping[str, Any]:
    asked = {name: body.get(name) for name in ("instructions", "max_output_tokens", "user", "safety_identifier")}
    defaults = {"tool_choice": "auto", "tools": [], "text": {"format": {"type": "text"}}, "reasoning": {}}
    given = {name: body.get(name) or default for name, default in defaults.items()}
    return {
        **asked,
        **given,
        "metadata": body.get("metadata") or {},
        "temperature": options.sampling.temperature,
        "top_p": options.sampling.top_p,
        "top_logprobs": options.sampling.logprobs or 0,
        "parallel_tool_calls": boolean(body, "parallel_tool_calls", default=True),
        "previous_response_id": None,
        "background": False,
        "store": False,
        "truncation": "disabled",
    }


def _tools(body: Fields) -> list[Fields]:
    """In the form of chat completions."""
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(array(body, "tools") or ())]


def _tool(tool: Any, param: str) -> Fields:
    if not isinstance(tool, dict):
        raise invalid_type(param, "an object", tool)
    kind = required_string(tool, "type", f"{param}.")
    if kind != "function":
        raise invalid_value(f"{param}.type", f'must be "function"; got {shown(kind)}')
    function: dict[str, Any] = {"name": required_string(tool, "name", f"{param}.")}
    description = string(tool, "description", None, f"{param}.")
    parameters = obj(tool, "parameters", f"{param}.")
    boolean(tool, "strict", path=f"{param}.")
    function |= {} if description is None else {"description": description}
    return {"type": "function", "function": function | ({} if parameters is None else {"parameters": parameters})}


def _tool_choice(body: Fields) -> Any:
    """In the form of chat completions."""
    value = body.get("tool_choice")
    if not isinstance(value, dict):
        return value
    if value.get("type") != "function":
        raise unsupported_parameter("tool_choice", "'tool_choice' may only name a function of this request")
    return {"type": "function", "function": {"name": required_string(value, "name", "tool_choice.")}}

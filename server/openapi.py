"""The OpenAPI description of every endpoint, for clients that generate code and for the fuzzer (`make fuzz`).

Bounds are the parsers' own names. A schema here says what a field may be by itself; what depends on other fields or on
the model (a token id in the vocabulary, a name of the served model) is a documented 400 or 404.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias, get_args

import verdraft
from verdraft.scheduler.request import Mode
from verdraft.server import parse_chat, parse_completion, parse_messages, parse_responses
from verdraft.server.fields import INT64_MAX, INT64_MIN
from verdraft.server.parse_common import (
    MAX_CHOICES,
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    MAX_STOP_LEN,
    MAX_STOPS,
)
from verdraft.server.requests import Limits

Schema: TypeAlias = dict[str, Any]

EVENTS, JSON = "text/event-stream", "application/json"
DESCRIPTIONS = {
    "200": "success",
    "400": "the request is wrong; `param` names the field",
    "401": "a valid key is needed",
    "404": "no such model, or no such path",
    "405": "no such method here",
    "413": "the body is too long",
    "429": "too many requests wait; see Retry-After",
    "500": "the server failed",
    "503": "loading, draining, stuck, or out of time",
}
OPEN = ("200", "405", "500")
ANY = ("200", "401", "405", "500", "503")
BODY = (*ANY, "400", "404", "413")
GENERATE = (*BODY, "429")


def description(limits: Limits | None) -> Schema:
    """The document; `limits` are None until the model is loaded, and then every known mode is named."""
    modes = limits.modes if limits else get_args(Mode)
    return {
        "openapi": "3.1.0",
        "info": {"title": "verdraft", "version": verdraft.__version__},
        "paths": _paths(modes),
        "components": {
            "schemas": {"Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _paths(modes: Sequence[str]) -> dict[str, Schema]:
    common = _sampling(modes)
    return {
        "/health": _get(OPEN, "503"),
        "/ready": _get(OPEN, "503"),
        "/metrics": _get(OPEN, content="text/plain"),
        "/version": _get(("200", "401", "405", "500")),
        "/openapi.json": _get(("200", "401", "405", "500")),
        "/server_info": _get(ANY),
        "/v1/models": _get(ANY),
        "/v1/models/{name}": _get(ANY, "404", parameters=[NAME]),
        "/v1/chat/completions": _post(GENERATE, _body(["messages"], CHAT | common), EVENTS),
        "/v1/completions": _post(GENERATE, _body(["prompt"], COMPLETION | common), EVENTS),
        "/v1/responses": _post(GENERATE, _body(["input"], RESPONSES), EVENTS),
        "/v1/messages": _post(GENERATE, _body(["messages", "max_tokens"], MESSAGES), EVENTS),
        "/v1/messages/count_tokens": _post(BODY, _body(["messages"], {name: MESSAGES[name] for name in COUNTED})),
        "/tokenize": _post(BODY, _body([], TOKENIZE)),
        "/detokenize": _post(BODY, _body(["tokens"], {"tokens": _array(IDS)})),
        "/abort_request": _post((*ANY, "400", "413"), _body(["id"], {"id": {"type": "string"}})),
        "/reset_prefix_cache": {"post": {"responses": _responses(ANY)}},
    }


# ---- operations


def _get(statuses: Sequence[str], *more: str, content: str = JSON, parameters: Sequence[Schema] = ()) -> Schema:
    return {"get": {"parameters": list(parameters), "responses": _responses((*statuses, *more), content)}}


def _post(statuses: Sequence[str], body: Schema, *content: str) -> Schema:
    request = {"required": True, "content": {JSON: {"schema": body}}}
    return {"post": {"requestBody": request, "responses": _responses(statuses, JSON, *content)}}


def _responses(statuses: Sequence[str], *content: str) -> Schema:
    success: Schema = {kind: {"schema": {"type": "object"} if kind == JSON else {}} for kind in content or (JSON,)}
    failure = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        status: {"description": DESCRIPTIONS[status], "content": success if status == "200" else failure}
        for status in sorted(statuses)
    }


# ---- fields


def _optional(kind: str, **bounds: Any) -> Schema:
    """null is the same as leaving the field out."""
    return {"type": [kind, "null"], **bounds}


def _array(items: Schema, **bounds: Any) -> Schema:
    return {"type": "array", "items": items, **bounds}


def _body(required: Sequence[str], properties: Schema) -> Schema:
    """Unknown fields are ignored."""
    return {"type": "object", "required": list(required), "properties": properties}


NAME: Schema = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
ERROR = _body(
    ["error"],
    {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _optional("string"),
                "code": _optional("string"),
            },
        }
    },
)

BOOLEAN, IDS = _optional("boolean"), {"type": "integer", "minimum": 0}
TEXT_PARTS = _array(_body(["type", "text"], {"type": {"const": "text"}, "text": {"type": "string"}}), minItems=1)
TEXT: Schema = {"anyOf": [{"type": "string"}, TEXT_PARTS]}
STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LEN}
STOP: Schema = {"anyOf": [{"type": "null"}, STOP_STRING, _array(STOP_STRING, maxItems=MAX_STOPS)]}
COUNT = _optional("integer", minimum=1)
PREDICTION: Schema = {
    "anyOf": [{"type": "null"}, _body(["type", "content"], {"type": {"const": "content"}, "content": TEXT})]
}
METADATA = _optional(
    "object",
    maxProperties=MAX_METADATA,
    propertyNames={"maxLength": MAX_METADATA_KEY},
    additionalProperties={"type": "string", "maxLength": MAX_METADATA_VALUE},
)


def _sampling(modes: Sequence[str]) -> Schema:
    """What chat and text completions share."""
    bias = {"type": "number", "minimum": -100, "maximum": 100}
    return {
        "model": _optional("string"),
        "max_tokens": COUNT,
        "temperature": _optional("number", minimum=0, maximum=2),
        "top_p": _optional("number", exclusiveMinimum=0, maximum=1),
        "top_k": _optional("integer", minimum=-1, maximum=INT64_MAX),
        "min_p": _optional("number", minimum=0, maximum=1),
        "n": _optional("integer", minimum=1, maximum=MAX_CHOICES),
        "seed": _optional("integer", minimum=INT64_MIN, maximum=INT64_MAX),
        "stop": STOP,
        "presence_penalty": _optional("number", minimum=-2, maximum=2),
        "frequency_penalty": _optional("number", minimum=-2, maximum=2),
        "repetition_penalty": _optional("number", exclusiveMinimum=0),
        "logit_bias": _optional("object", propertyNames={"pattern": "^(0|[1-9][0-9]*)$"}, additionalProperties=bias),
        "min_tokens": _optional("integer", minimum=0),
        "stop_token_ids": {"anyOf": [{"type": "null"}, _array(IDS)]},
        "prediction": PREDICTION,
        "speculation": {"enum": [None, *modes]},
        "cache_salt": _optional("string", minLength=1),
        "priority": _optional("integer", minimum=INT64_MIN, maximum=INT64_MAX),
        "metadata": METADATA,
        "stream_options": _optional("object", properties={"include_usage": BOOLEAN}),
        **dict.fromkeys(("stream", "ignore_eos", "return_token_ids", "return_speculation"), BOOLEAN),
    }


FUNCTION = _body(["name"], {"name": {"type": "string", "minLength": 1}, "parameters": _optional("object")})
TOOL = _body(["type", "function"], {"type": {"const": "function"}, "function": FUNCTION})
MESSAGE = _body(["role", "content"], {"role": {"enum": list(parse_chat.ROLES)}, "content": TEXT})
VARIABLES = _optional(
    "object",
    additionalProperties={"type": ["boolean", "number", "string", "null"]},
    propertyNames={"not": {"enum": list(parse_chat.OWN_VARIABLES)}},
)
CHAT: Schema = {
    "messages": _array(MESSAGE, minItems=1),
    "max_completion_tokens": COUNT,
    "logprobs": BOOLEAN,
    "top_logprobs": _optional("integer", minimum=0, maximum=parse_chat.MAX_TOP_LOGPROBS),
    "tools": _optional("array", items=TOOL),
    "tool_choice": {"anyOf": [{"enum": [None, "none", "auto", "required"]}, {"type": "object"}]},
    "response_format": _optional("object", properties={"type": {"enum": ["text", "json_object", "json_schema"]}}),
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
    "chat_template_kwargs": VARIABLES,
}
ID_PROMPT = _array(IDS, minItems=1)
PROMPT_TEXT: Schema = {"type": "string", "minLength": 1}
BATCHES = [_array(inner, minItems=1, maxItems=MAX_CHOICES) for inner in (PROMPT_TEXT, ID_PROMPT)]
COMPLETION: Schema = {
    "prompt": {"anyOf": [PROMPT_TEXT, ID_PROMPT, *BATCHES]},
    "echo": BOOLEAN,
    "logprobs": _optional("integer", minimum=0, maximum=parse_completion.MAX_TOP_LOGPROBS),
}
RESPONSES: Schema = {
    "model": _optional("string"),
    "input": {"anyOf": [{"type": "string"}, _array({"type": "object"}, minItems=1)]},
    "instructions": _optional("string"),
    "max_output_tokens": COUNT,
    "temperature": _optional("number", minimum=0, maximum=2),
    "top_p": _optional("number", exclusiveMinimum=0, maximum=1),
    "metadata": METADATA,
    "stream": BOOLEAN,
    "include": {"anyOf": [{"type": "null"}, _array({"enum": [parse_responses.LOGPROBS]})]},
    "top_logprobs": _optional("integer", minimum=0, maximum=parse_chat.MAX_TOP_LOGPROBS),
    "chat_template_kwargs": VARIABLES,
}
TURN = _body(["role", "content"], {"role": {"enum": list(parse_messages.ROLES)}, "content": TEXT})
MESSAGES: Schema = {
    "model": _optional("string"),
    "messages": _array(TURN, minItems=1),
    "system": {"anyOf": [{"type": "null"}, TEXT]},
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": _optional("number", minimum=0, maximum=1),
    "stop_sequences": {"anyOf": [{"type": "null"}, _array(STOP_STRING, maxItems=MAX_STOPS)]},
    "thinking": _optional("object", required=["type"], properties={"type": {"enum": list(parse_messages.THINKING)}}),
    "stream": BOOLEAN,
    "chat_template_kwargs": VARIABLES,
}
COUNTED = ("model", "messages", "system", "thinking", "chat_template_kwargs")
TOKENIZE: Schema = {
    "model": _optional("string"),
    "prompt": {"type": "string"},
    "messages": {"anyOf": [{"type": "null"}, _array(MESSAGE, minItems=1)]},
    "add_generation_prompt": BOOLEAN,
}

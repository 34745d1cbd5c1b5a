"""The bodies of /v1/completions, /tokenize, /detokenize and /abort_request (HTTP contract, sections 2 and 5)."""

from typing import Any, TypeAlias

from verdraft.server.errors import (
    array_too_long,
    bad_request,
    below_min,
    context_length,
    empty_array,
    empty_string,
    invalid_type,
    invalid_value,
    missing,
)
from verdraft.server.fields import Fields, boolean, integer, string
from verdraft.server.parse_chat import parse_chat_prompt
from verdraft.server.parse_common import MAX_CHOICES, parse_max_tokens, parse_model, parse_options, parse_token_ids
from verdraft.server.requests import CompletionRequest, Limits, TokenizeRequest

DEFAULT_MAX_TOKENS = 16
MAX_TOP_LOGPROBS = 5
CHAT_ONLY = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools", "tool_choice")

Prompt: TypeAlias = str | tuple[int, ...]


def parse_completion(body: Fields, limits: Limits) -> CompletionRequest:
    """Raises ApiError for the first thing that is wrong."""
    model = parse_model(body, limits)
    prompts = parse_prompts(body, limits)
    echo = boolean(body, "echo")
    max_tokens = parse_max_tokens(body, "max_tokens", DEFAULT_MAX_TOKENS, 0)
    if max_tokens == 0 and not echo:
        raise below_min("max_tokens", 0, 1)
    logprobs = integer(body, "logprobs", None, 0, MAX_TOP_LOGPROBS)
    options = parse_options(
        body, limits, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=logprobs if echo else None
    )
    if len(prompts) * options.n > MAX_CHOICES:
        message = f"prompts x n may be at most {MAX_CHOICES}; got {len(prompts)} x {options.n}"
        raise bad_request("array_above_max_length", "prompt", message)
    return CompletionRequest(model=model, prompts=prompts, options=options, echo=echo)


def parse_prompts(body: Fields, limits: Limits) -> tuple[Prompt, ...]:
    """`prompt`: str, [str], [int] or [[int]]."""
    value = body.get("prompt")
    if value is None:
        raise missing("prompt")
    if not isinstance(value, list):
        return (_text_prompt(value),)
    if not value:
        raise empty_array("prompt")
    if isinstance(value[0], str):
        return tuple(_text_prompt(entry) for entry in _batch(value))
    if isinstance(value[0], list):
        return tuple(_id_prompt(entry, limits) for entry in _batch(value))
    return (_id_prompt(value, limits),)


def _batch(value: list[Any]) -> list[Any]:
    if len(value) > MAX_CHOICES:
        raise array_too_long("prompt", len(value), MAX_CHOICES)
    return value


def _text_prompt(value: Any) -> str:
    if not isinstance(value, str):
        raise invalid_type("prompt", "a string, an array of strings, or one or more arrays of token ids", value)
    if not value:
        raise empty_string("prompt")
    return value


def _id_prompt(value: Any, limits: Limits) -> tuple[int, ...]:
    if value == []:
        raise empty_array("prompt")
    if isinstance(value, list) and len(value) >= limits.max_model_len:
        raise context_length("prompt", len(value), limits.max_model_len)
    return parse_token_ids(value, "prompt", limits.vocab_size)


def parse_tokenize(body: Fields, limits: Limits) -> TokenizeRequest:
    """`prompt` (may be empty) or `messages`."""
    parse_model(body, limits)
    if body.get("messages") is not None:
        if body.get("prompt") is not None:
            raise invalid_type("prompt", "absent when 'messages' is given", body["prompt"])
        return TokenizeRequest(chat=parse_chat_prompt(body))
    for name in CHAT_ONLY:
        if body.get(name) is not None:
            raise invalid_value(name, "needs messages")
    prompt = string(body, "prompt", None)
    if prompt is None:
        raise missing("prompt")
    return TokenizeRequest(prompt=prompt)


def parse_detokenize(body: Fields, limits: Limits) -> tuple[int, ...]:
    """`tokens`: ids in the vocabulary; may be empty."""
    parse_model(body, limits)
    if body.get("tokens") is None:
        raise missing("tokens")
    return parse_token_ids(body["tokens"], "tokens", limits.vocab_size)


def parse_abort(body: Fields) -> str:
    """The response id to abort."""
    response_id = string(body, "id", None)
    if response_id is None:
        raise missing("id")
    return response_id

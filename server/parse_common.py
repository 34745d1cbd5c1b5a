"""The fields that chat and text completions share (HTTP contract, sections 3, 4, 9 and 12)."""

from typing import Any, Literal, cast, get_args

from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Fault, Mode
from verdraft.server.errors import (
    above_max,
    array_too_long,
    bad_request,
    below_min,
    empty_string,
    invalid_type,
    invalid_value,
    missing,
    model_not_found,
    shown,
    string_too_long,
    unsupported_parameter,
)
from verdraft.server.fields import (
    INT64_MAX,
    Fields,
    as_float,
    boolean,
    integer,
    is_number,
    number,
    obj,
    required_string,
    string,
    text_content,
)
from verdraft.server.requests import GenerationOptions, Limits

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_LEN = 1024  # characters
MAX_METADATA = 16  # pairs
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512  # characters

# What parse_options() reads under these names on every endpoint, however its own fields are called.
EXTENSIONS = (
    "stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "min_tokens", "ignore_eos", "stop_token_ids", "seed", "prediction", "speculation",
    "return_speculation", "return_token_ids", "cache_salt", "priority", "fault",
)  # fmt: skip

FaultKind = Literal["raise", "nan", "freeze", "preempt"]


def parse_model(body: Fields, limits: Limits) -> str:
    """The served model's id; absent or null means it."""
    name = string(body, "model", limits.model)
    if name != limits.model:
        raise model_not_found(name)
    return name


def parse_options(
    body: Fields, limits: Limits, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
) -> GenerationOptions:
    """Everything but the prompt and the fields that the endpoints read differently, which come as arguments."""
    refuse_unsupported(body)
    check_metadata(body)
    stream = boolean(body, "stream")
    return GenerationOptions(
        sampling=_sampling(body, limits, max_tokens, logprobs, prompt_logprobs),
        n=integer(body, "n", 1, 1, MAX_CHOICES),
        stop=parse_stop(body),
        stream=stream,
        include_usage=parse_stream_options(body, stream),
        return_token_ids=boolean(body, "return_token_ids"),
        return_speculation=boolean(body, "return_speculation"),
        speculation=parse_speculation(body, limits),
        prediction=parse_prediction(body),
        cache_salt=string(body, "cache_salt", "", empty=False),
        priority=integer(body, "priority", 0),
        fault=parse_fault(body) if limits.test_hooks else None,
    )


def _sampling(
    body: Fields, limits: Limits, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    return SamplingParams(
        temperature=number(body, "temperature", 1.0, 0, 2),
        top_p=number(body, "top_p", 1.0, 0, 1, open_minimum=True),
        top_k=max(integer(body, "top_k", 0, -1), 0),
        min_p=number(body, "min_p", 0.0, 0, 1),
        repetition_penalty=number(body, "repetition_penalty", 1.0, 0, open_minimum=True),
        presence_penalty=number(body, "presence_penalty", 0.0, -2, 2),
        frequency_penalty=number(body, "frequency_penalty", 0.0, -2, 2),
        logit_bias=parse_logit_bias(body, limits.vocab_size),
        max_tokens=max_tokens,
        min_tokens=parse_min_tokens(body, max_tokens, limits),
        ignore_eos=boolean(body, "ignore_eos"),
        stop_token_ids=parse_stop_token_ids(body, limits.vocab_size),
        seed=integer(body, "seed", None),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def parse_min_tokens(body: Fields, max_tokens: int | None, limits: Limits) -> int:
    """At most max_tokens; without one, at most what a context can hold."""
    min_tokens = integer(body, "min_tokens", 0, 0)
    maximum = limits.max_model_len - 1 if max_tokens is None else max_tokens
    if min_tokens > maximum:
        raise invalid_value("min_tokens", f"must not be more than the {maximum} tokens that may be generated")
    return min_tokens


def parse_max_tokens(body: Fields, name: str, default: int | None, minimum: int) -> int | None:
    """More than fits is fine, however large: the engine clips it. orjson reads integers beyond 64 bits as floats."""
    value = body.get(name)
    if value is not None and is_number(value) and value > INT64_MAX:
        return INT64_MAX
    return integer(body, name, default, minimum)


def parse_stop(body: Fields, name: str = "stop") -> tuple[str, ...]:
    """`stop`: a string or an array of at most 16."""
    value = body.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise invalid_type(name, "a string or an array of strings", value)
    if len(value) > MAX_STOPS:
        raise array_too_long(name, len(value), MAX_STOPS)
    return tuple(_stop_string(entry, name) for entry in value)


def _stop_string(entry: Any, name: str) -> str:
    if not isinstance(entry, str):
        raise invalid_type(name, "a string or an array of strings", entry)
    if not entry:
        raise empty_string(name)
    if len(entry) > MAX_STOP_LEN:
        raise string_too_long(name, len(entry), MAX_STOP_LEN)
    return entry


def parse_token_ids(value: Any, param: str, vocab_size: int) -> tuple[int, ...]:
    """An array of ids in [0, vocab_size)."""
    if not isinstance(value, list):
        raise invalid_type(param, "an array of token ids", value)
    for token in value:
        if not isinstance(token, int) or isinstance(token, bool):
            raise invalid_type(param, "an array of integers", token)
        if not 0 <= token < vocab_size:
            raise invalid_value(param, f"the token id {shown(token)} is outside the vocabulary [0, {vocab_size})")
    return tuple(value)


def parse_stop_token_ids(body: Fields, vocab_size: int) -> frozenset[int]:
    value = body.get("stop_token_ids")
    return frozenset() if value is None else frozenset(parse_token_ids(value, "stop_token_ids", vocab_size))


def parse_logit_bias(body: Fields, vocab_size: int) -> dict[int, float]:
    """`logit_bias`: token id in decimal -> -100..100."""
    entries = obj(body, "logit_bias") or {}
    return {_bias_token(key, vocab_size): _bias_value(key, value) for key, value in entries.items()}


def _bias_token(key: str, vocab_size: int) -> int:
    canonical = key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key
    if not canonical or int(key) >= vocab_size:
        raise invalid_value("logit_bias", f"{shown(key)} is not a token id in [0, {vocab_size})")
    return int(key)


def _bias_value(key: str, value: Any) -> float:
    if not is_number(value):
        raise invalid_type("logit_bias", f"an object of numbers (token {key})", value)
    if value < -100:
        raise below_min("logit_bias", value, -100.0)
    if value > 100:
        raise above_max("logit_bias", value, 100.0)
    return as_float(value, "logit_bias")


def parse_stream_options(body: Fields, stream: bool) -> bool:
    """Whether the usage is to be streamed."""
    options = obj(body, "stream_options")
    if options is None:
        return False
    if not stream:
        raise invalid_value("stream_options", "only possible with stream: true")
    return boolean(options, "include_usage", path="stream_options.")


def parse_speculation(body: Fields, limits: Limits) -> Mode:
    value = string(body, "speculation", "auto")
    if value not in limits.modes:
        raise invalid_value("speculation", f"must be one of {', '.join(limits.modes)}; got {shown(value)}")
    return value


def parse_prediction(body: Fields) -> str | None:
    """None when it was not sent; "" is an empty prediction."""
    value = obj(body, "prediction")
    if value is None:
        return None
    kind = value.get("type")
    if kind != "content":
        code = "missing_required_parameter" if kind is None else "invalid_value"
        raise bad_request(code, "prediction.type", "'prediction.type' must be \"content\"")
    if value.get("content") is None:
        raise missing("prediction.content")
    return text_content(value["content"], "prediction.content")


def parse_fault(body: Fields) -> Fault | None:
    """A fault to inject; read only by servers with test hooks."""
    value = obj(body, "fault")
    if value is None:
        return None
    kind = required_string(value, "kind", "fault.")
    if kind not in get_args(FaultKind):
        raise invalid_value("fault.kind", f"must be one of {', '.join(get_args(FaultKind))}; got {shown(kind)}")
    after_tokens = integer(value, "after_tokens", 0, 0, path="fault.")
    return Fault(cast(FaultKind, kind), after_tokens, number(value, "seconds", 0.0, 0, path="fault."))


def refuse_unsupported(body: Fields) -> None:
    """Fields that clients know from OpenAI and that would change the answer, unless they ask for the default."""
    for name in ("audio", "web_search_options", "moderation"):
        if body.get(name) is not None:
            raise unsupported_parameter(name)
    if body.get("modalities") not in (None, ["text"]):
        raise unsupported_parameter("modalities", "'modalities' may only be [\"text\"]")
    if boolean(body, "store"):
        raise unsupported_parameter("store", "'store' is not supported: nothing is kept")
    if body.get("functions") not in (None, []):
        raise unsupported_parameter("functions", "'functions' is not supported; use 'tools'")
    if body.get("function_call") not in (None, "none"):
        raise unsupported_parameter("function_call", "'function_call' is not supported; use 'tool_choice'")
    if string(body, "suffix", ""):
        raise unsupported_parameter("suffix")
    best_of = integer(body, "best_of", None)
    if best_of is not None and best_of != integer(body, "n", 1, 1, MAX_CHOICES):
        raise unsupported_parameter("best_of", "'best_of' is not supported unless it equals 'n'")


def check_metadata(body: Fields) -> None:
    """`metadata` has no effect, but it must be what OpenAI allows."""
    entries = obj(body, "metadata") or {}
    if len(entries) > MAX_METADATA:
        raise invalid_value("metadata", f"at most {MAX_METADATA} pairs; got {len(entries)}")
    for key, value in entries.items():
        if not isinstance(value, str):
            raise invalid_type("metadata", "an object of strings", value)
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            bounds = f"{MAX_METADATA_KEY} and {MAX_METADATA_VALUE} characters"
            raise invalid_value("metadata", f"keys and values may have at most {bounds}")

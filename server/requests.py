"""What parsing a body gives: everything typed, in range and complete. Knows no JSON, no HTTP, no tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Fault, Mode
from verdraft.server.json_form import JsonForm

Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the parsers must know of this server."""

    model: str  # the served model's id
    vocab_size: int
    max_model_len: int
    modes: tuple[Mode, ...] = ("auto", "off", "suffix")  # values of `speculation` that this server can do
    test_hooks: bool = False  # `fault` is read only then


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """What both endpoints share.

    `sampling.logprobs` is None without logprobs, else the number of top entries to report for each token (0: none).
    `sampling.max_tokens` is None for "all that fits" (chat) and 0 only together with echo.
    """

    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    return_speculation: bool = False
    speculation: Mode = "auto"
    prediction: str | None = None  # None: not sent (the usage details appear only when it was); "" is a no-op
    cache_salt: str = ""  # "": none
    priority: int = 0
    fault: Fault | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """What the chat template renders; also what `/tokenize` gets with `messages`."""

    messages: tuple[Message, ...]  # content is a str always; `developer` is already `system`
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the last message is an assistant turn that stays open
    forced: Sequence[Mapping[str, Any]] = ()  # the tools of which the answer will call one
    no_thoughts: bool = False  # the client wants an answer without any
    variables: Mapping[str, Any] = field(default_factory=dict)  # what else the template reads, such as enable_thinking


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """POST /v1/chat/completions."""

    model: str
    prompt: ChatPrompt
    options: GenerationOptions
    form: JsonForm | None = None  # None: any text


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """POST /v1/completions. Choice `index` of the response is prompt index * n + sample index."""

    model: str
    prompts: tuple[str | tuple[int, ...], ...]  # special-token text in a str is parsed as special tokens
    options: GenerationOptions
    echo: bool = False


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """POST /tokenize: exactly one of the two is not None."""

    prompt: str | None = None
    chat: ChatPrompt | None = None

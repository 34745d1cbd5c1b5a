"""From a request's bytes to what the engine needs: parsed, rendered, tokenised. Runs in a worker thread."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from verdraft.scheduler.request import NeverStop, Request, StopCheck
from verdraft.server.assembler import TextAssembler
from verdraft.server.choices import ChoiceReader, Echo
from verdraft.server.errors import context_length, unsupported_parameter
from verdraft.server.json_form import JsonForm
from verdraft.server.jsonbody import parse_body
from verdraft.server.parse_chat import parse_chat
from verdraft.server.parse_completion import parse_completion
from verdraft.server.parse_messages import parse_messages_body
from verdraft.server.parse_responses import parse_responses_body
from verdraft.server.requests import ChatRequest, GenerationOptions, Limits
from verdraft.server.service import Text
from verdraft.server.stops import StopSet
from verdraft.server.thinking import NoThoughts, Splitter, Thoughts, leaves_thoughts_open
from verdraft.server.tool_calls import CallsAfterThoughts, ForcedCall
from verdraft.spec.constraint import UNCONSTRAINED, Constraint


def free_text() -> Constraint:
    """No grammar."""
    return UNCONSTRAINED


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One HTTP request. `param` names the field that holds the prompt; `shown` are fields that the answer repeats."""

    options: GenerationOptions
    prompts: tuple[Sequence[int], ...]
    echoes: tuple[Echo, ...]  # one for each prompt
    prediction: Sequence[int]
    stops: StopSet
    text: Text
    param: str
    splitter: Callable[[], Splitter] = NoThoughts
    shown: Mapping[str, Any] = field(default_factory=dict)
    constraint: Callable[[], Constraint] = free_text
    form: JsonForm | None = None  # whose grammar must still be compiled
    source: str = ""  # of that grammar

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.options.n

    def assembler(self) -> TextAssembler:
        """A fresh one: a choice needs one for its text, and one more to stop at a stop string."""
        sampling = self.options.sampling
        invisible = self.text.eos | sampling.stop_token_ids
        return TextAssembler(self.text.tokenizer.token_bytes, self.stops, sampling.min_tokens, invisible)

    def reader(self, index: int) -> ChoiceReader:
        """For the choice of that index in the response."""
        echo = self.echoes[index // self.options.n]
        return ChoiceReader(index, self.assembler(), self.text.tokenizer, echo, self.splitter())

    def requests(self, response_id: str, arrived: float | None = None) -> list[Request]:
        """The engine's requests, by prompt, then choice: the order of the response's choices.

        `arrived` in time.monotonic() seconds; None: now.
        """
        arrived = time.monotonic() if arrived is None else arrived
        options = self.options
        return [
            Request(
                id=response_id,
                prompt=prompt,
                params=options.sampling,
                choice=choice,
                speculation=options.speculation,
                prediction=self.prediction,
                cache_salt=options.cache_salt,
                priority=options.priority,
                stop=self._stop_check(),
                constraint=self.constraint(),
                fault=options.fault,
                arrived=arrived,
            )
            for prompt in self.prompts
            for choice in range(options.n)
        ]

    def _stop_check(self) -> StopCheck:
        return self.assembler() if self.options.stop else NeverStop()


MAX_PREDICTION = 16  # characters, for each token of the context: about four times what an output can have

Prepare: TypeAlias = Callable[[bytes, str | None, Text, Limits], Prepared]


def prepare_chat(body: bytes, content_type: str | None, text: Text, limits: Limits) -> Prepared:
    """/v1/chat/completions. Raises ApiError."""
    return _chat(parse_chat(parse_body(body, content_type), limits), text, limits, "messages")


def prepare_responses(body: bytes, content_type: str | None, text: Text, limits: Limits) -> Prepared:
    """/v1/responses. Raises ApiError."""
    request = parse_responses_body(parse_body(body, content_type), limits)
    prepared = _chat(request.chat, text, limits, "input", request.shown)
    if request.chat.options.sampling.logprobs is not None and prepared.splitter is not NoThoughts:
        message = "'include': logprobs are only for answers of nothing but text, not for calls and thoughts"
        raise unsupported_parameter("include", message)
    return prepared


def prepare_messages(body: bytes, content_type: str | None, text: Text, limits: Limits) -> Prepared:
    """/v1/messages. Raises ApiError."""
    return _chat(parse_messages_body(parse_body(body, content_type), limits), text, limits, "messages")


def _chat(
    request: ChatRequest, text: Text, limits: Limits, param: str, shown: Mapping[str, Any] | None = None
) -> Prepared:
    if len(request.prompt.messages) >= limits.max_model_len:  # each takes a token and more
        raise context_length(param, len(request.prompt.messages), limits.max_model_len, exact=False)
    prompt = text.template.encode(request.prompt, lambda rendered: _check_length(rendered, text, limits, param))
    source = request.form.grammar() if request.form else ""
    kept = text.grammars.kept(source)
    return Prepared(
        options=request.options,
        prompts=(prompt,),
        echoes=(Echo(),),
        prediction=_prediction(request.options, text, limits),
        stops=StopSet(request.options.stop),
        text=text,
        param=param,
        splitter=_splitter(request, text, prompt),
        shown=shown or {},
        constraint=kept.start if kept else free_text,
        form=None if kept else request.form,
        source=source,
    )


def _splitter(request: ChatRequest, text: Text, prompt: Sequence[int]) -> Callable[[], Splitter]:
    """How to tell thoughts, text and calls apart. A grammar leaves no room for any but what it asks for."""
    form, template = request.form, text.template
    if form:
        heads = dict(zip(form.calls, form.heads, strict=False))  # plain JSON has no calls
        return partial(ForcedCall, heads, form.tail) if heads else NoThoughts
    opened = leaves_thoughts_open(prompt, text.tokenizer)
    thoughts: Callable[[], Splitter] = partial(Thoughts, opened) if template.thinks else NoThoughts
    calls = template.calls
    if not request.prompt.tools or calls is None:
        return thoughts
    return lambda: CallsAfterThoughts(thoughts(), calls())


def prepare_completion(body: bytes, content_type: str | None, text: Text, limits: Limits) -> Prepared:
    """/v1/completions. Raises ApiError."""
    request = parse_completion(parse_body(body, content_type), limits)
    prompts = tuple(_ids(prompt, text, limits) for prompt in request.prompts)
    with_logprobs = request.options.sampling.logprobs is not None
    echoes = (
        Echo(_shown(given, text), ids if with_logprobs else ())
        for given, ids in zip(request.prompts, prompts, strict=True)
    )
    return Prepared(
        options=request.options,
        prompts=prompts,
        echoes=tuple(echoes) if request.echo else (Echo(),) * len(prompts),
        prediction=_prediction(request.options, text, limits),
        stops=StopSet(request.options.stop),
        text=text,
        param="prompt",
    )


def _ids(prompt: str | tuple[int, ...], text: Text, limits: Limits) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    _check_length(prompt, text, limits, "prompt")
    return text.tokenizer.encode_prompt(prompt)


def _check_length(prompt: str, text: Text, limits: Limits, param: str) -> None:
    """Refuse what can never fit without tokenising it, which takes seconds for megabytes."""
    least = text.tokenizer.least_tokens(prompt)
    if least >= limits.max_model_len:
        raise context_length(param, least, limits.max_model_len, exact=False)


def _shown(prompt: str | tuple[int, ...], text: Text) -> str:
    return prompt if isinstance(prompt, str) else text.tokenizer.decode(prompt, show_special=True)


def _prediction(options: GenerationOptions, text: Text, limits: Limits) -> Sequence[int]:
    """Of any length, but no output can have use for more than MAX_PREDICTION characters a token."""
    used = (options.prediction or "")[: MAX_PREDICTION * limits.max_model_len]
    return text.tokenizer.encode(used, allow_special=False) if used else ()

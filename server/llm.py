"""Offline use: prompts in, texts out, in the calling thread. No HTTP and no asyncio.

from verdraft import LLM, SamplingParams
outputs = LLM().generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=32))
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tqdm import tqdm

from verdraft.model.source import resolve_model
from verdraft.scheduler.outputs import TokenLogprobs, TokenSlice
from verdraft.scheduler.request import Request
from verdraft.server.build import build_engine, build_text
from verdraft.server.build_predictor import add_predictor
from verdraft.server.choices import ChoiceReader, Echo, Event, Finish, join
from verdraft.server.errors import ApiError
from verdraft.server.llm_params import SamplingParams
from verdraft.server.parse_chat import parse_chat_prompt
from verdraft.server.prepare import Prepared
from verdraft.server.requests import GenerationOptions
from verdraft.server.settings import resolve_settings, warn_of_unknown_variables
from verdraft.server.stops import StopSet

Message: TypeAlias = Mapping[str, Any]

OFFLINE_SETTINGS = (
    "max_model_len",
    "max_num_seqs",
    "max_batch_tokens",
    "kv_blocks",
    "block_size",
    "memory_fraction",
    "speculation",
    "router",
    "exits",
    "eagle",
    "eagle_draft",
    "predictor",
    "dtype",
    "device",
    "kernels",
    "deterministic",
    "cuda_graphs",
    "tensor_parallel",
    "quantization",
    "activations",
    "threads",
)


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """One choice. `logprobs` has one entry for each token when `SamplingParams.logprobs` asked for them."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: Finish
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt's choices, in order."""

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[ChoiceOutput, ...]


@dataclass(slots=True, eq=False)
class _Choice:
    """A choice while it is generated."""

    reader: ChoiceReader
    events: list[Event] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def read(self, piece: TokenSlice) -> None:
        self.events.append(self.reader.read(piece))
        self.logprobs += piece.logprobs

    def output(self) -> ChoiceOutput:
        whole = join(self.events)
        assert whole.finish is not None, "the choice still runs"
        return ChoiceOutput(whole.index, whole.text, whole.tokens, whole.finish, tuple(self.logprobs))


class LLM:
    """A loaded model. One thread at a time may use it."""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        """`model` as for `verdraft serve`; `settings` are the flags in OFFLINE_SETTINGS, spelt with underscores.

        Raises TypeError for any other setting, SettingsError for a bad value, ModelError, KernelUnavailable.
        """
        unknown = sorted(set(settings) - set(OFFLINE_SETTINGS))
        if unknown:
            raise TypeError(f"LLM has no setting {unknown[0]!r}; there are {', '.join(OFFLINE_SETTINGS)}")
        given = {"model": model, **settings} if model else settings
        resolved = resolve_settings({**given, "learning": "off"})  # no thread of its own
        warn_of_unknown_variables()
        path = resolve_model(resolved.model)
        self._engine = build_engine(resolved, path)
        self._text = build_text(path, self._engine.config.eos_token_ids)
        add_predictor(self._engine, self._text, resolved)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt, a text or token ids; one SamplingParams for all, or one for each.

        Without any an answer has at most 16 tokens, as in vLLM.

        Raises ValueError for a bad prompt and ContextTooLong for one that does not fit.
        """
        if not isinstance(prompts, Iterable):
            raise ValueError(f"prompts: expected a text or a list, got {prompts!r}")
        given: Iterable[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else prompts
        ids = [self._prompt_ids(prompt) for prompt in given]
        if not all(ids):
            raise ValueError("prompts: every prompt must have at least one token")
        return self._run(ids, self._params_of(params, len(ids)), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several.

        Messages, tools and variables of the template are those of the HTTP API; raises ValueError for bad ones, and for
        tools when the model's template shows none. Calls of tools stay as the model writes them, in the text.
        """
        if tools and not self._text.template.knows_tools:
            raise ValueError("tools: the model's chat template shows none")
        shared = {"tools": list(tools), "chat_template_kwargs": dict(chat_template_kwargs or {})}
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = messages if several else [messages]
        try:
            prompts = [parse_chat_prompt({"messages": list(each), **shared}) for each in conversations]
            ids = [self._text.template.encode(prompt) for prompt in prompts]
        except ApiError as error:
            raise ValueError(error.message) from None
        return self._run(ids, self._params_of(params, len(ids)), use_tqdm)

    def _prompt_ids(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return self._checked(prompt)
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise ValueError("prompts: expected text without lone surrogates")
        return self._text.tokenizer.encode_prompt(prompt)

    def _checked(self, ids: Sequence[int]) -> Sequence[int]:
        if not isinstance(ids, Sequence):
            raise ValueError(f"prompts: expected texts or lists of token ids, got {ids!r}")
        size = self._text.tokenizer.vocab_size
        if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < size for token in ids):
            raise ValueError(f"token ids must be integers from 0 to {size - 1}")
        return ids

    def _params_of(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if len(params) != count:
            raise ValueError(f"params: expected one for each of the {count} prompts, got {len(params)}")
        return params

    def _run(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        for prompt, one in zip(prompts, params, strict=True):
            self._engine.check_fits(len(prompt))
            self._checked([*one.logit_bias, *one.stop_token_ids])
        pairs = zip(prompts, params, strict=True)
        batches = [self._submit(str(number), prompt, one) for number, (prompt, one) in enumerate(pairs)]
        choices = {request: choice for batch in batches for request, choice in batch.items()}
        self._drive(choices, use_tqdm)
        return [
            RequestOutput(tuple(prompt), tuple(choice.output() for choice in batch.values()))
            for prompt, batch in zip(prompts, batches, strict=True)
        ]

    def _submit(self, name: str, prompt: Sequence[int], sampling: SamplingParams) -> dict[Request, _Choice]:
        options = GenerationOptions(sampling=sampling.resolved, n=sampling.n, stop=sampling.stops)
        prepared = Prepared(
            options=options,
            prompts=(prompt,),
            echoes=(Echo(),),
            prediction=(),
            stops=StopSet(options.stop),
            text=self._text,
            param="prompt",
        )
        requests = prepared.requests(name)
        for request in requests:
            self._engine.add(request, requests[0] if request.choice else None)
        return {request: _Choice(prepared.reader(request.choice)) for request in requests}

    def _drive(self, choices: Mapping[Request, _Choice], use_tqdm: bool) -> None:
        """Step until every choice has ended; whatever interrupts it ends them all."""
        open_requests = set(choices)
        try:
            with tqdm(total=len(choices), desc="generating", disable=not use_tqdm or len(choices) < 2) as bar:
                while open_requests:
                    for request, piece in self._engine.step():
                        choices[request].read(piece)
                        if piece.finish:
                            open_requests.remove(request)
                            bar.update()
        finally:
            for request in open_requests:
                self._engine.abort(request)

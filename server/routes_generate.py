"""The endpoints that generate, as plain ASGI: a client that leaves ends the work at once."""

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from verdraft.scheduler.errors import EngineError
from verdraft.server.answer_messages import MessagesAnswer
from verdraft.server.answer_responses import ResponsesAnswer
from verdraft.server.answers import Answer, ChatAnswer, CompletionAnswer
from verdraft.server.connection import ClientGone, read_body, while_connected
from verdraft.server.exchange import Exchange
from verdraft.server.generation import Generation
from verdraft.server.lifecycle import Lifecycle
from verdraft.server.metrics import Metrics
from verdraft.server.outcome import Outcome
from verdraft.server.prepare import (
    Prepare,
    Prepared,
    prepare_chat,
    prepare_completion,
    prepare_messages,
    prepare_responses,
)
from verdraft.server.report import Report
from verdraft.server.responses import JsonResponse, refused, request_timeout
from verdraft.server.service import Service
from verdraft.server.sse import EventStream, SlowReader


@dataclass(frozen=True, slots=True)
class Dialect:
    """What differs between the endpoints."""

    path: str
    id_prefix: str
    prepare: Prepare
    answer: Callable[..., Answer]


DIALECTS = (
    Dialect("/v1/chat/completions", "chatcmpl-", prepare_chat, ChatAnswer),
    Dialect("/v1/completions", "cmpl-", prepare_completion, CompletionAnswer),
    Dialect("/v1/responses", "resp_", prepare_responses, ResponsesAnswer),
    Dialect("/v1/messages", "msg_", prepare_messages, MessagesAnswer),
)


@dataclass(frozen=True, slots=True)
class GenerateEndpoint:
    """An ASGI application for one path. `timeout` in seconds, 0: none."""

    dialect: Dialect
    lifecycle: Lifecycle[Service]
    metrics: Metrics
    max_body_bytes: int
    timeout: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self.lifecycle.admit()
        generation = Generation(self.dialect.id_prefix + uuid.uuid4().hex, self.metrics)
        generation.limit(self.timeout, request_timeout(self.timeout))
        with self.lifecycle.track(generation):
            try:
                body = await generation.prelude(read_body(scope, receive, self.max_body_bytes))
                await while_connected(receive, self._answer(scope, send, service, generation, body))
            except (ClientGone, SlowReader):
                pass  # counted where the work was cut; nobody is left to answer
            finally:
                await generation.close()

    async def _answer(self, scope: Scope, send: Send, service: Service, generation: Generation, body: bytes) -> None:
        try:
            prepared = await generation.prelude(self._prepare(scope, service, body))
        except asyncio.CancelledError:
            self.metrics.aborted.inc()
            raise
        generation.bounded = prepared.options.stream
        self._submit(service, generation, prepared)
        exchange = self._exchange(service, generation, prepared)
        try:
            await self._send(exchange, prepared, scope, send)
        except (asyncio.CancelledError, SlowReader):
            exchange.settle("abort")
            raise
        except Exception:
            exchange.settle("error")
            raise
        finally:
            scope["state"]["outcome"] = Outcome(generation.id, service.limits.model, exchange.reason, exchange.report)

    async def _prepare(self, scope: Scope, service: Service, body: bytes) -> Prepared:
        content_type = Headers(scope=scope).get("content-type")
        prepared = await service.workers.run(
            len(body), self.dialect.prepare, body, content_type, service.text, service.limits
        )
        if prepared.form is None:
            return prepared
        grammar = await service.workers.compile(service.text.grammars, prepared.form, prepared.source)
        return replace(prepared, constraint=grammar.start, form=None)

    def _submit(self, service: Service, generation: Generation, prepared: Prepared) -> None:
        try:
            generation.submit(service.engine.submit, prepared.requests(generation.id, generation.started))
        except EngineError as error:
            raise refused(error, prepared.param, service.limits.max_model_len) from None
        for prompt in prepared.prompts:
            self.metrics.prompt(len(prompt))

    def _exchange(self, service: Service, generation: Generation, prepared: Prepared) -> Exchange:
        options = prepared.options
        answer = self.dialect.answer(
            id=generation.id,
            model=service.limits.model,
            created=int(time.time()),
            prepared=prepared,
        )
        lens, predicted = [len(prompt) for prompt in prepared.prompts], options.prediction is not None
        mode: str = service.config.speculation if options.speculation == "auto" else options.speculation
        if mode == "off" and predicted and options.speculation == "auto":
            mode = "prediction"  # which nobody has switched off
        report = Report(lens, options.n, mode, predicted, service.text.template.thinks)
        return Exchange(generation, prepared, answer, report, self.metrics)

    async def _send(self, exchange: Exchange, prepared: Prepared, scope: Scope, send: Send) -> None:
        if prepared.options.stream:
            await exchange.stream(EventStream(send))
            return
        response = JsonResponse(await exchange.whole())
        await response(scope, _never_received, send)


async def _never_received() -> dict[str, str]:
    raise AssertionError("a plain response reads nothing")

"""Everything around generation: models, health, metrics, tokenizer, administration."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request, Response

import verdraft
from verdraft.scheduler.errors import EngineDead
from verdraft.server.connection import read_body
from verdraft.server.errors import model_not_found
from verdraft.server.jsonbody import Body, parse_body
from verdraft.server.lifecycle import Lifecycle
from verdraft.server.metrics import CONTENT_TYPE, Metrics
from verdraft.server.openapi import description
from verdraft.server.parse_common import parse_model
from verdraft.server.parse_completion import parse_abort, parse_detokenize, parse_tokenize
from verdraft.server.parse_messages import parse_messages_prompt
from verdraft.server.requests import Limits
from verdraft.server.responses import JsonResponse, engine_dead, engine_failing, engine_stuck
from verdraft.server.service import Service, Text
from verdraft.server.settings import Settings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MetaRoutes:
    """The handlers of all endpoints that generate nothing."""

    lifecycle: Lifecycle[Service]
    metrics: Metrics
    settings: Settings

    def table(self) -> list[tuple[str, str, Callable[..., Any]]]:
        """(method, path, handler)"""
        return [
            ("GET", "/health", self.health),
            ("GET", "/ready", self.ready),
            ("GET", "/metrics", self.expose),
            ("GET", "/version", self.version),
            ("GET", "/openapi.json", self.openapi),
            ("GET", "/server_info", self.server_info),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("POST", "/v1/messages/count_tokens", self.count_tokens),
            ("POST", "/abort_request", self.abort),
            ("POST", "/reset_prefix_cache", self.reset),
        ]

    async def health(self) -> Response:
        """200 while the engine makes progress and not every step fails, draining or not."""
        match self.lifecycle.loaded().engine.health():
            case "dead":
                raise engine_dead()
            case "stuck":
                raise engine_stuck()
            case "failing":
                raise engine_failing()
        return JsonResponse({"status": "ok"})

    async def ready(self) -> Response:
        """200 when a request would be admitted."""
        self.lifecycle.admit()
        return JsonResponse({"status": "ok"})

    async def expose(self) -> Response:
        return Response(self.metrics.expose(), headers={"content-type": CONTENT_TYPE})

    async def version(self) -> Response:
        return JsonResponse({"version": verdraft.__version__})

    async def openapi(self) -> Response:
        service = self.lifecycle.service
        return JsonResponse(description(service.limits if service else None))

    async def server_info(self) -> Response:
        """Sizes and modes; nothing secret."""
        service = self.lifecycle.loaded()
        config, limits = service.config, service.limits
        return JsonResponse(
            {
                "version": verdraft.__version__,
                "model": limits.model,
                "vocab_size": limits.vocab_size,
                "max_model_len": limits.max_model_len,
                "max_num_seqs": config.max_num_seqs,
                "max_queue": config.max_queue,
                "kv_blocks": config.num_blocks,
                "block_size": config.block_size,
                "max_body_bytes": self.settings.max_body_bytes,
                "quantization": self.settings.quantization,
                "activations": self.settings.activations,
                "speculation": config.speculation,
                "speculation_modes": list(limits.modes),
            }
        )

    async def models(self) -> Response:
        return JsonResponse({"object": "list", "data": [_card(self.lifecycle.loaded())]})

    async def model(self, name: str) -> Response:
        service = self.lifecycle.loaded()
        if name != service.limits.model:
            raise model_not_found(name)
        return JsonResponse(_card(service))

    async def tokenize(self, request: Request) -> Response:
        service = self.lifecycle.admit()
        tokens = await self._parsed(request, service, _tokenize)
        limits = service.limits
        return JsonResponse({"count": len(tokens), "max_model_len": limits.max_model_len, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        return JsonResponse({"prompt": await self._parsed(request, self.lifecycle.admit(), _detokenize)})

    async def count_tokens(self, request: Request) -> Response:
        """How long a prompt `/v1/messages` would have."""
        count = await self._parsed(request, self.lifecycle.admit(), _count_tokens)
        return JsonResponse({"input_tokens": count})

    async def abort(self, request: Request) -> Response:
        response_id = await self._parsed(request, self.lifecycle.loaded(), lambda body, text, limits: parse_abort(body))
        return JsonResponse({"aborted": self.lifecycle.abort(response_id)})

    async def reset(self) -> Response:
        try:
            await self.lifecycle.loaded().engine.reset_caches()
        except EngineDead:
            self.lifecycle.admit()  # the server is shutting down: that is the reason
            raise engine_dead() from None
        return JsonResponse({})

    async def _parsed(self, request: Request, service: Service, use: Callable[[Body, Text, Limits], T]) -> T:
        """`use` on the parsed body, in a worker thread."""
        raw = await read_body(request.scope, request.receive, self.settings.max_body_bytes)
        content_type = request.headers.get("content-type")
        return await service.workers.run(
            len(raw), lambda: use(parse_body(raw, content_type), service.text, service.limits)
        )


def _card(service: Service) -> dict[str, Any]:
    limits = service.limits
    return {
        "id": limits.model,
        "object": "model",
        "created": service.created,
        "owned_by": "verdraft",
        "max_model_len": limits.max_model_len,
    }


def _tokenize(body: Body, text: Text, limits: Limits) -> list[int]:
    request = parse_tokenize(body, limits)
    if request.chat is not None:
        return text.template.encode(request.chat)
    return text.tokenizer.encode_prompt(request.prompt or "")


def _count_tokens(body: Body, text: Text, limits: Limits) -> int:
    parse_model(body, limits)
    return len(text.template.encode(parse_messages_prompt(body)))


def _detokenize(body: Body, text: Text, limits: Limits) -> str:
    return text.tokenizer.decode(parse_detokenize(body, limits), show_special=True)

"""The ASGI application: routes, error handlers and the middleware around them. Holds no state of its own."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from verdraft.server.connection import ClientGone
from verdraft.server.errors import ApiError, internal_error, method_not_allowed, not_found
from verdraft.server.lifecycle import Lifecycle
from verdraft.server.metrics import Metrics
from verdraft.server.middleware import wrap
from verdraft.server.responses import error_response
from verdraft.server.routes_generate import DIALECTS, GenerateEndpoint
from verdraft.server.routes_meta import MetaRoutes
from verdraft.server.service import Service
from verdraft.server.settings import Settings
from verdraft.server.tracing import Tracer


def build_app(settings: Settings, lifecycle: Lifecycle[Service], tracer: Tracer) -> ASGIApp:
    """Answers from the first moment on; what needs the model says 503 `loading` until the lifecycle is ready."""
    metrics = Metrics(
        lambda: lifecycle.service.engine.counters() if lifecycle.service else None,
        lambda: lifecycle.service.text.grammars.num_entries if lifecycle.service else 0,
    )
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    for method, path, handler in MetaRoutes(lifecycle, metrics, settings).table():
        methods = ["GET", "HEAD"] if method == "GET" else [method]  # of a HEAD's answer, uvicorn sends no body
        app.add_api_route(path, handler, methods=methods, response_model=None)
    for dialect in DIALECTS:
        endpoint = GenerateEndpoint(dialect, lifecycle, metrics, settings.max_body_bytes, settings.request_timeout)
        app.router.routes.append(Route(dialect.path, endpoint, methods=["POST"]))
    _handle_errors(app, metrics)
    return wrap(app, settings.api_keys(), metrics.error, tracer)


def _handle_errors(app: FastAPI, metrics: Metrics) -> None:
    def handler(translate: Callable[[Request, Exception], ApiError]) -> Callable[..., Awaitable[Response]]:
        async def handle(request: Request, error: Exception) -> Response:
            answer = translate(request, error)
            metrics.error(answer)
            return error_response(answer)

        return handle

    app.add_exception_handler(ApiError, handler(lambda request, error: error))  # type: ignore[arg-type,return-value]
    app.add_exception_handler(HTTPException, handler(_routing_error))
    app.add_exception_handler(ClientGone, _nobody_listens)
    app.add_exception_handler(Exception, handler(lambda request, error: internal_error()))


def _routing_error(request: Request, error: Exception) -> ApiError:
    """The router's own 404 and 405."""
    path = request.url.path
    if isinstance(error, HTTPException) and error.status_code == 405:
        answer = method_not_allowed(request.method, path)
        answer.headers |= dict(error.headers or {})
        return answer
    return not_found(path)


async def _nobody_listens(request: Request, error: Exception) -> Response:
    return Response(status_code=400)

"""The life of a server process: bind, answer while the model loads, serve, drain, end."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import uvicorn
import uvloop
from starlette.types import ASGIApp

from verdraft.server.app import build_app
from verdraft.server.lifecycle import Lifecycle
from verdraft.server.protocol import limited
from verdraft.server.service import Service
from verdraft.server.settings import Settings, SettingsError
from verdraft.server.signals import exit_now, ignore_stop_signals, on_stop_signals
from verdraft.server.tracing import make_tracer
from verdraft.server.watchdog import watch

logger = logging.getLogger("verdraft.server")

KEEP_ALIVE_SECONDS = 90  # idle connections; clients' pools expect more than 60
CLOSE_SECONDS = 3  # for open connections, after the last answer
BACKLOG = 2048
OTHER_FILES = 256  # that the process has open, beside its connections


class Server(uvicorn.Server):
    """uvicorn's, but signals are the lifecycle's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(settings: Settings) -> socket.socket:
    """Raises SettingsError when the address cannot be used."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((settings.host, settings.port))
        sock.listen(BACKLOG)  # only now the port is ours: two may bind one that nobody listens on
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        raise SettingsError(f"cannot listen on {settings.host} port {settings.port}: {reason}") from None
    return sock


def run(settings: Settings, load: Callable[[], Service]) -> None:
    """Serve until a signal says stop. `load` runs in a thread; what it raises ends the server."""
    sock = bind(settings)
    allow_files(settings.max_connections + OTHER_FILES)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings, sock, load))
    finally:
        ignore_stop_signals()


def allow_files(count: int) -> None:
    """Let the process open `count` files, where the system's soft limit is lower and the hard one allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < count:
        logger.warning("only %d files may be open: fewer connections than --max-connections fit", allowed)


async def _run(settings: Settings, sock: socket.socket, load: Callable[[], Service]) -> None:
    lifecycle: Lifecycle[Service] = Lifecycle()
    lifecycle.install_signals()
    tracer = make_tracer(os.environ)
    server = Server(_config(build_app(settings, lifecycle, tracer), settings.max_connections))
    serving = asyncio.create_task(server.serve([sock]))
    try:
        service = await _in_passing_thread(load)
        keep_for_good()
        await service.start()
        lifecycle.ready(service)
        _announce(service, sock)
        await _until_drained(service, lifecycle, settings.drain_timeout)
    finally:
        server.should_exit = True
        await serving
        await asyncio.to_thread(tracer.close)
        on_stop_signals(exit_now)  # the loop ends and will take no more calls


def keep_for_good() -> None:
    """What is there now stays: no collection of garbage looks at it again.

    It is hundreds of thousands of objects, most of them torch's. All threads of Python wait while they are looked at: a
    tenth of a second and more, in the middle of a step.
    """
    gc.collect()
    gc.freeze()


async def _until_drained(service: Service, lifecycle: Lifecycle[Service], drain_timeout: float) -> None:
    watching = asyncio.create_task(watch(service.engine))
    try:
        await lifecycle.stopping.wait()
        await lifecycle.drain(drain_timeout)
        await service.close()
    finally:
        watching.cancel()


async def _in_passing_thread(load: Callable[[], Service]) -> Service:
    """Run `load` in a thread that ends with it.

    A thread that has run torch keeps OpenMP workers as long as it lives. With more workers than cores in the process,
    OpenMP puts them to sleep after every operation, which made each product of the engine's thread four times as slow.
    """
    loader = ThreadPoolExecutor(1, thread_name_prefix="verdraft-load")
    try:
        return await asyncio.get_running_loop().run_in_executor(loader, load)
    finally:
        loader.shutdown(wait=False)


def _config(app: ASGIApp, max_connections: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",
        http=limited(max_connections),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )


def _announce(service: Service, sock: socket.socket) -> None:
    host, port = sock.getsockname()[:2]
    config = service.config
    logger.info(
        "ready: %s on http://%s:%d, %d tokens of context, %d KV blocks of %d tokens, speculation %s",
        service.limits.model,
        f"[{host}]" if ":" in host else host,
        port,
        config.max_model_len,
        config.num_blocks,
        config.block_size,
        config.speculation,
    )

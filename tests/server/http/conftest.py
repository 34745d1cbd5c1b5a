"""The whole HTTP side around an engine that plays a script: no model, no thread."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from verdraft.scheduler.async_engine import SequenceStream
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.errors import ContextTooLong, EngineError
from verdraft.scheduler.outputs import SourceStats, SpecStats, Summary, Timing, TokenLogprobs, TokenSlice
from verdraft.scheduler.request import Request
from verdraft.server.app import build_app
from verdraft.server.chat_template import ChatTemplate
from verdraft.server.grammars import Grammars
from verdraft.server.lifecycle import Lifecycle
from verdraft.server.metrics import IDLE
from verdraft.server.requests import Limits
from verdraft.server.service import Service, Text, TextWorkers
from verdraft.server.settings import Settings
from verdraft.server.tokenizer import TextTokenizer
from verdraft.server.tracing import NoTracer, Tracer

CONFIG = EngineConfig(max_model_len=200, num_blocks=64)


class ScriptedEngine:
    """Says `words` to everybody, one word for each slice, then finishes; waits before word `hold_at` until released."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self.words = ["Hello", " the", "re \u00e9", "!"]
        self.finish: TokenSlice = TokenSlice(finish="stop")
        self.refusal: EngineError | None = None
        self.state = "ok"
        self.hold_at = -1
        self.release = asyncio.Event()
        self._held = asyncio.Semaphore(0)
        self.requests: list[Request] = []
        self.ended: list[str] = []  # how each sequence ended
        self.resets = 0
        self._encode = encode
        self._tasks: dict[Request, asyncio.Task[None]] = {}
        self._streams: dict[Request, SequenceStream] = {}

    def submit(self, requests: Sequence[Request]) -> list[SequenceStream]:
        if self.refusal:
            raise self.refusal
        for request in requests:
            if len(request.prompt) > CONFIG.max_prompt_len:
                raise ContextTooLong(len(request.prompt), CONFIG.max_prompt_len)
            self.requests.append(request)
            self._streams[request] = SequenceStream(request, self._abort)
            self._tasks[request] = asyncio.create_task(self._play(request))
        return [self._streams[request] for request in requests]

    async def _play(self, request: Request) -> None:
        num_tokens = 0
        for position, word in enumerate(self.words):
            if position == self.hold_at:
                self._held.release()
                await self.release.wait()
            tokens = tuple(self._encode(word))
            num_tokens += len(tokens)
            asked = request.params.logprobs is not None
            logprobs = tuple(TokenLogprobs(-0.5, ((token, -0.5),)) for token in tokens) if asked else ()
            self._streams[request].deliver(TokenSlice(tokens, logprobs))
            await asyncio.sleep(0)
        self._end(request, self.finish, num_tokens)

    async def held(self, count: int = 1) -> None:
        """Wait until `count` sequences wait at `hold_at`, and what they said before has been passed on."""
        for _ in range(count):
            await self._held.acquire()
        for _ in range(20):  # a few turns of the loop: nothing else is in the way
            await asyncio.sleep(0)

    def _end(self, request: Request, last: TokenSlice, num_tokens: int) -> None:
        spec = SpecStats(2, 4, sources={"suffix": SourceStats(2, 6, 3), "prediction": SourceStats(1, 4, 4)})
        summary = Summary(1, num_tokens, spec, Timing(1.0, 2.0, 3.0, 4.0))
        self.ended.append(last.finish or "?")
        self._streams[request].deliver(TokenSlice(finish=last.finish, error_code=last.error_code, summary=summary))

    def _abort(self, request: Request) -> None:
        self._tasks[request].cancel()
        self._end(request, TokenSlice(finish="abort"), 0)

    def counters(self) -> Any:
        return IDLE

    def health(self) -> str:
        return self.state

    async def reset_caches(self) -> None:
        self.resets += 1


class Stage:
    """A server without a socket: `client` speaks to it, `app` is the ASGI application itself."""

    def __init__(self, engine: ScriptedEngine, lifecycle: Lifecycle[Service], app: Any) -> None:
        self.engine = engine
        self.lifecycle = lifecycle
        self.app = app
        transport = httpx.ASGITransport(app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20)

    async def metric(self, line: str) -> float:
        """The value of one exact series."""
        text = (await self.client.get("/metrics")).text
        return next(float(row.rpartition(" ")[2]) for row in text.splitlines() if row.rpartition(" ")[0] == line)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("VERDRAFT_")]:
        monkeypatch.delenv(name)


MakeStage = Callable[..., Any]


@pytest.fixture
def stage(byte_level_folder: Path, tmp_path: Path) -> MakeStage:
    """async with stage(loaded=True, template=None, **settings) as s: ..."""

    @asynccontextmanager
    async def make(
        loaded: bool = True, template: str | None = None, tracer: Tracer | None = None, **settings: Any
    ) -> AsyncIterator[Stage]:
        folder = byte_level_folder
        if template is not None:
            folder = tmp_path
            (folder / "tokenizer.json").write_bytes((byte_level_folder / "tokenizer.json").read_bytes())
            (folder / "chat_template.jinja").write_text(template)
        tokenizer = TextTokenizer(byte_level_folder)
        engine = ScriptedEngine(lambda text: tokenizer.encode(text, allow_special=False))
        lifecycle: Lifecycle[Service] = Lifecycle()
        text = Text(tokenizer, ChatTemplate(folder, tokenizer), frozenset(), Grammars(tokenizer, frozenset()))
        limits = Limits(model="org/demo", vocab_size=tokenizer.vocab_size, max_model_len=CONFIG.max_model_len)
        workers = TextWorkers()
        config = replace(CONFIG, speculation=settings.get("speculation", CONFIG.speculation))
        service = Service(limits, config, text, engine, workers, created=7)  # type: ignore[arg-type]
        if loaded:
            lifecycle.ready(service)
        made = Stage(engine, lifecycle, build_app(Settings(**settings), lifecycle, tracer or NoTracer()))
        async with made.client:
            yield made
        workers.close()

    return make

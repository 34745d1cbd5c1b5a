"""What answers requests once the model is loaded: the engine, the text side and the numbers that clients may see."""

import asyncio
import contextvars
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

from verdraft.scheduler.async_engine import AsyncEngine
from verdraft.scheduler.config import EngineConfig
from verdraft.server.chat_template import ChatTemplate
from verdraft.server.errors import rate_limited
from verdraft.server.grammars import Grammar, Grammars
from verdraft.server.json_form import JsonForm
from verdraft.server.requests import Limits
from verdraft.server.tokenizer import TextTokenizer

MAX_SCHEMAS = 8  # that compile or wait for it
SMALL_BODY = 16 << 10  # bytes; longer ones are tokenised in a queue of their own
P = ParamSpec("P")
T = TypeVar("T")


class TextWorkers:
    """Threads that parse, render and tokenise, so that the event loop never does. Short bodies do not wait for long.

    Schemas are compiled by threads of their own: a few bad ones keep nobody else waiting.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(2, thread_name_prefix="verdraft-text")
        self._long = ThreadPoolExecutor(2, thread_name_prefix="verdraft-long-text")
        self._schemas = ThreadPoolExecutor(MAX_SCHEMAS, thread_name_prefix="verdraft-schema")
        self._compiling: dict[Hashable, asyncio.Future[Grammar]] = {}

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work(*args, **kwargs)` in a thread; `size` is the length of the body it works on."""
        pool = self._short if size <= SMALL_BODY else self._long
        context = contextvars.copy_context()  # the log of the work is the request's
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, lambda: context.run(work, *args, **kwargs))

    async def compile(self, grammars: Grammars, form: JsonForm, source: str) -> Grammar:
        """Equal forms (`source` is form.grammar()) at the same time are compiled once, for all who wait.

        Raises ApiError: 400 for a bad form, 429 when too many others are at it.
        """
        key = (form.param, form.calls, source)  # what an error message says, too
        if key not in self._compiling:
            if len(self._compiling) >= MAX_SCHEMAS:
                raise rate_limited("schemas are being compiled")
            compiling = asyncio.get_running_loop().run_in_executor(self._schemas, grammars.compile, form)
            self._compiling[key] = compiling
            compiling.add_done_callback(lambda _: self._compiling.pop(key))
        return await asyncio.shield(self._compiling[key])  # others wait for it when this client leaves

    def close(self) -> None:
        """Start nothing more."""
        for pool in (self._short, self._long, self._schemas):
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Text:
    """A model's text side. Safe in any thread."""

    tokenizer: TextTokenizer
    template: ChatTemplate
    eos: frozenset[int]  # never shown, special or not
    grammars: Grammars


class Companion(Protocol):
    """Something with a life of its own beside the engine."""

    def start(self) -> None:
        """The service begins."""
        ...

    def close(self) -> None:
        """The service has ended; may take a moment."""
        ...


@dataclass(frozen=True, slots=True)
class Service:
    """Built in one place, the command line."""

    limits: Limits
    config: EngineConfig
    text: Text
    engine: AsyncEngine
    workers: TextWorkers
    created: int  # seconds since 1970
    companions: tuple[Companion, ...] = ()

    async def start(self) -> None:
        for companion in self.companions:
            companion.start()
        await self.engine.start()

    async def close(self) -> None:
        """End the engine's thread; requests that still run get finish "abort"."""
        self.workers.close()
        await self.engine.close()
        for companion in self.companions:
            await asyncio.to_thread(companion.close)

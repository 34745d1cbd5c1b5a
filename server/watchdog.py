"""Says in the log when the engine stops making progress, where its thread stands, and when it goes on again."""

import asyncio
import logging
import sys
import threading
import traceback
from typing import Protocol

logger = logging.getLogger("verdraft.server")

LOOK_SECONDS = 1.0


class Watched(Protocol):
    """scheduler/async_engine.py's AsyncEngine."""

    def health(self) -> str: ...


async def watch(engine: Watched, thread_name: str = "verdraft-engine") -> None:
    """Until cancelled. /health says the same to whoever asks; this is for whoever reads the log later."""
    before = "ok"
    while True:
        now = engine.health()
        if now == "stuck" != before:
            logger.error("the engine has work but makes no progress; its thread is here:\n%s", _where(thread_name))
        elif now == "failing" != before:
            logger.error("every step of the engine fails")
        elif now == "ok" != before:
            logger.warning("the engine makes progress again")
        before = now
        await asyncio.sleep(LOOK_SECONDS)


def _where(thread_name: str) -> str:
    """Files and lines of our own code, no values."""
    ident = next((thread.ident for thread in threading.enumerate() if thread.name == thread_name), None)
    frame = sys._current_frames().get(ident) if ident else None
    return "".join(traceback.format_stack(frame)) if frame else "it has ended"

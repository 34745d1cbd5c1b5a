"""The watchdog: one line when the engine is stuck, with the place, and one when it moves."""

import asyncio
import threading

import pytest

from verdraft.server import watchdog
from verdraft.server.watchdog import watch


class Moody:
    """An engine with a thread that stands in linger() until told to end."""

    def __init__(self) -> None:
        self.state = "ok"
        self.end = threading.Event()
        self.thread = threading.Thread(target=self.linger, name="a-moody-engine")

    def linger(self) -> None:
        self.end.wait()

    def health(self) -> str:
        return self.state


async def test_what_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.01)
    caplog.set_level("INFO")
    engine = Moody()
    engine.thread.start()
    watching = asyncio.create_task(watch(engine, "a-moody-engine"))
    for state in ("ok", "stuck", "ok", "failing", "ok", "dead"):
        engine.state = state
        await asyncio.sleep(0.1)
    watching.cancel()
    engine.end.set()
    engine.thread.join()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4
    assert "no progress" in lines[0]
    assert "in linger" in lines[0]
    assert "every step" in lines[2]
    assert all("progress again" in lines[place] for place in (1, 3))

"""Real servers: `verdraft serve` as a subprocess on a free port, with the demo model."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

START_SECONDS = 240


class RunningServer:
    """A process and how to reach it. Port 0 lets the system choose; the log says which one it was."""

    def __init__(self, log: Path, python: Sequence[str], *flags: str, **environment: str) -> None:
        self.log = log
        command = [sys.executable, *python, "serve", "--port", "0", "--threads", "1", *flags]
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, env={**os.environ, **environment}
            )

    def wait_ready(self) -> "RunningServer":
        """Wait until the log says where it listens."""
        deadline = time.monotonic() + START_SECONDS
        while not (found := re.search(r"ready: .* on (http://\S+),", self.log.read_text())):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, "the server never became ready"
            time.sleep(0.1)
        self.url = found[1]
        return self

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


Launch = Callable[..., RunningServer]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory, demo_path: Path) -> Iterator[Launch]:
    """launch(*flags, python=what to run, **environment): a server, perhaps still loading; stopped at the end."""
    started: list[RunningServer] = []

    def start(*flags: str, python: Sequence[str] = ("-m", "verdraft"), **environment: str) -> RunningServer:
        log = tmp_path_factory.mktemp("server") / "log"
        started.append(RunningServer(log, python, "--kv-blocks", "1024", *flags, **environment))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def server(launch: Launch) -> RunningServer:
    """One server for all tests but those that need another; the last one stops it."""
    return launch("--drain-timeout", "100").wait_ready()


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as found:
        yield found


@pytest.fixture
def sdk(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def model(sdk: openai.OpenAI) -> str:
    """The served model's id."""
    return sdk.models.list().data[0].id

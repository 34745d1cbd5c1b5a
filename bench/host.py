"""The server under load: started here or already running, and the memory of its processes."""

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Self

import httpx
import psutil

START_TIMEOUT = 600.0  # seconds; the first start fetches the demo model


@dataclass(frozen=True, slots=True)
class Host:
    """Where the server answers; `pid` is None when it was started elsewhere and --pid was not given."""

    url: str
    pid: int | None


class ServerFailed(Exception):
    """The server did not start, or did not end well."""


def add_host_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `serving` reads."""
    parser.add_argument("--url", help="a running server; without it one is started and stopped")
    parser.add_argument("--pid", type=int, help="its process on this machine, to measure memory")
    parser.add_argument("--model", help="MODEL of `verdraft serve` (default: the demo model)")
    parser.add_argument("serve", nargs="*", metavar="-- FLAG", help="flags for `verdraft serve`, after --")


@contextmanager
def serving(args: argparse.Namespace) -> Iterator[Host]:
    """A ready server, ours to stop unless --url names one."""
    if args.url:
        yield Host(args.url.rstrip("/"), args.pid)
        return
    model = [args.model] if args.model else []
    with started([*model, *args.serve]) as host:
        yield host


@contextmanager
def started(flags: Sequence[str]) -> Iterator[Host]:
    """`verdraft serve FLAGS` on a free port. Raises ServerFailed, with the end of its log."""
    port = free_port()
    command = [sys.executable, "-m", "verdraft", "serve", *flags, "--host", "127.0.0.1", "--port", str(port)]
    with served_by(command, f"http://127.0.0.1:{port}", "/ready") as host:
        yield host


@contextmanager
def served_by(
    command: Sequence[str], url: str, ready: str, env: Mapping[str, str] | None = None, exit_codes: Sequence[int] = (0,)
) -> Iterator[Host]:
    """Any server, until `ready` answers 200; stopped with SIGTERM. Raises ServerFailed, with the end of its log."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})})
        try:
            _wait_ready(process, f"{url}{ready}", log)
            yield Host(url, process.pid)
            if process.poll() is not None:
                raise ServerFailed(f"the server ended by itself with {process.returncode}: {_tail(log)}")
        finally:
            code = _stop(process)
        if code not in exit_codes:
            raise ServerFailed(f"the server's exit code after SIGTERM is {code}: {_tail(log)}")


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(process: "subprocess.Popen[bytes]", url: str, log: IO[str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailed(f"{shlex.join(map(str, process.args))} ended: {_tail(log)}")  # type: ignore[arg-type]
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.2)
    raise ServerFailed(f"not ready after {START_TIMEOUT:.0f} s: {_tail(log)}")


def _stop(process: "subprocess.Popen[bytes]") -> int:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return log.read()[-2000:]


@dataclass(slots=True)
class MemoryWatch:
    """Samples the resident memory of a process and its children while the context is open."""

    pid: int | None
    interval: float = 0.25  # seconds
    samples: list[tuple[float, int]] = field(default_factory=list)  # (time.monotonic(), bytes)
    _done: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def peak(self) -> int:
        """Bytes; 0 without a process to watch."""
        return max((size for _, size in self.samples), default=0)

    def __enter__(self) -> Self:
        if self.pid is not None:
            self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._done.is_set():
            if self.pid is not None and (size := resident(self.pid)):
                self.samples.append((time.monotonic(), size))
            self._done.wait(self.interval)


def resident(pid: int) -> int:
    """Bytes of resident memory of a process and all its children; 0 when it is gone."""
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for process in family:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # a child that has just ended
    return total

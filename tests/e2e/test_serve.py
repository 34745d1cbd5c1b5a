"""The server as its users meet it: a process, a socket, the official client."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.demo

RunningServer = Any  # conftest's class: a server with .url and .process
Launch = Callable[..., RunningServer]

HELLO: Any = [{"role": "user", "content": "Say hi."}]
TALE = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12, "return_token_ids": True}
ENDLESS = {"prompt": "Once upon a time", "max_tokens": 5000, "ignore_eos": True}


def gauge(client: httpx.Client, name: str) -> float:
    rows = [row.split(" ") for row in client.get("/metrics").text.splitlines()]
    return next(float(row[1]) for row in rows if row[0] == f"verdraft_{name}")


def eventually(check: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not check() and time.monotonic() < deadline:
        time.sleep(0.05)
    return check()


def test_chat(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": HELLO, "temperature": 0, "max_tokens": 8})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"].startswith("Hello")


@pytest.mark.parametrize("speculation", ["off", "suffix", "auto"])
def test_speculation_changes_no_token(client: httpx.Client, speculation: str) -> None:
    runs = [
        client.post("/v1/completions", json={**TALE, "speculation": mode}).json()["choices"][0]["token_ids"]
        for mode in ("off", speculation, speculation)
    ]
    assert runs[0] == runs[1] == runs[2]


def test_errors_over_the_wire(client: httpx.Client) -> None:
    bad = client.post("/v1/completions", json={**TALE, "temperature": 3, "stream": True})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "temperature")
    assert client.get("/nope").json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/nope"])
def test_head_is_get_without_a_body(client: httpx.Client, path: str) -> None:
    head, get = client.head(path), client.get(path)
    assert head.status_code == get.status_code
    assert {**head.headers, "x-request-id": ""} == {**get.headers, "x-request-id": ""}
    assert head.content == b""


def test_no_collection_of_garbage_looks_at_what_was_loaded(launch: Launch) -> None:
    """It took a tenth of a second each time, in which no thread of Python ran."""
    count = "import gc, verdraft.server.cli as cli; cli.main(); print('kept', gc.get_freeze_count())"
    server = launch(python=["-c", count]).wait_ready()
    assert server.stop() == 0
    kept = re.search(r"kept (\d+)", server.log.read_text())
    assert kept is not None
    assert int(kept[1]) > 50_000


def test_an_unknown_variable_is_in_the_log(launch: Launch) -> None:
    log = launch("--port", "0", VERDRAFT_API_KEYS="sk-x").wait_ready().log.read_text()
    assert "VERDRAFT_API_KEYS: there is no such setting; the nearest is VERDRAFT_API_KEY" in log
    assert "sk-x" not in log


def test_what_is_not_http_gets_the_error_object(client: httpx.Client) -> None:
    with socket.create_connection((client.base_url.host, client.base_url.port or 80), timeout=20) as sock:
        sock.sendall(b"what is this\r\n\r\n")
        answer = sock.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"invalid_json"' in answer


def test_openai_client(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as sdk:
        plain = sdk.chat.completions.create(model=sdk.models.list().data[0].id, messages=HELLO, temperature=0)
        with pytest.raises(openai.BadRequestError) as refused:
            sdk.chat.completions.create(model=plain.model, messages=[])
    assert plain.choices[0].finish_reason == "stop"
    assert refused.value.param == "messages"


async def test_openai_async_stream(server: RunningServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as sdk:
        model = (await sdk.models.list()).data[0].id
        ask = {"model": model, "prompt": TALE["prompt"], "temperature": 0, "max_tokens": 12}
        plain = await sdk.completions.create(**ask)
        stream = await sdk.completions.create(**ask, stream=True)
        parts = [chunk.choices[0].text async for chunk in stream]
    assert "".join(parts) == plain.choices[0].text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(client: httpx.Client, stream: bool) -> None:
    aborted = gauge(client, "requests_aborted_total")
    with socket.create_connection((client.base_url.host, client.base_url.port or 80), timeout=20) as sock:
        body = httpx.Request("POST", client.base_url.join("/v1/completions"), json={**ENDLESS, "stream": stream})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body.content)}\r\n"
        sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body.content)
        assert eventually(lambda: gauge(client, "num_requests_running") == 1)
    assert eventually(lambda: gauge(client, "requests_aborted_total") == aborted + 1)
    assert eventually(lambda: gauge(client, "num_requests_running") == gauge(client, "kv_cache_usage_perc") == 0)


def test_a_signal_while_loading_ends_at_once(launch: Launch) -> None:
    server = launch("--port", "0")
    assert eventually(lambda: handles_sigterm(server.process.pid))
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0


def handles_sigterm(pid: int) -> bool:
    found = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(found and int(found[1], 16) >> (signal.SIGTERM - 1) & 1)


LATE = """
import os, signal, verdraft.server.cli as cli
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)
late = Late()
cli.main()
"""


def test_a_signal_while_the_interpreter_ends_is_ignored(launch: Launch) -> None:
    """Python had given its handlers back to the system by then, and the server died with exit code -15."""
    assert launch(python=["-c", LATE]).wait_ready().stop() == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["/no/such/model"],
        ["--port", "0", "--host", "256.0.0.1"],
        ["--port", "0", "--log-level", "error", "--kernels", "cpu", "--dtype", "bfloat16"],
    ],
)
def test_what_cannot_start_says_so_in_one_line(flags: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "verdraft", "serve", *flags], capture_output=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.decode().strip().count("\n") == 0
    assert done.stdout == b""


def test_drain(server: RunningServer) -> None:
    """The last test of this server. SIGTERM while a stream runs: new requests are refused, the stream ends well, exit
    code 0."""
    with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client:
        with client.stream("POST", "/v1/completions", json={**TALE, "max_tokens": 60, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert eventually(lambda: client.get("/ready").status_code == 503)
            assert client.post("/v1/completions", json=TALE).json()["error"]["code"] == "draining"
            assert client.get("/health").status_code == 200
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
    assert server.process.wait(60) == 0

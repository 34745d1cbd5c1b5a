"""A server that is watched: no call to the outside, no secret in its log, faults that stay their request's own."""

import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.demo

RunningServer = Any  # conftest's class: a server with .url and .process

# Python code cannot get past an audit hook. The probe shows that the hook sees what it should.
GUARDED = """
import socket, sys
def guard(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        print("OUTBOUND", event, file=sys.stderr, flush=True)
sys.addaudithook(guard)
socket.socket().connect_ex(("127.0.0.1", 9))
from verdraft.server.cli import main
main(sys.argv[1:])
"""
COMP, CHAT = "/v1/completions", "/v1/chat/completions"
TALE = {"prompt": "Once upon a plumduff", "temperature": 0, "max_tokens": 12, "return_token_ids": True}


@pytest.fixture(scope="module")
def watched(launch: Callable[..., RunningServer], tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("sk-one\nsk-two\n")
    flags = ("--api-key", f"@{keys}", "--log-format", "json", "--drain-timeout", "100")
    return launch(*flags, python=("-c", GUARDED), VERDRAFT_TEST_HOOKS="1").wait_ready()


def asked(server: RunningServer, **body: Any) -> httpx.Response:
    headers = {"authorization": "Bearer sk-two", "x-request-id": "label-7"}
    return httpx.post(server.url + COMP, json=TALE | body, headers=headers, timeout=120, trust_env=False)


def log_with(server: RunningServer, response_id: str) -> list[str]:
    """Lines of the log once one of them tells of that response, which may be a moment after its client has it."""
    deadline = time.monotonic() + 30
    while response_id not in server.log.read_text():
        assert time.monotonic() < deadline, "the log never told of the response"
        time.sleep(0.05)
    return list(server.log.read_text().splitlines())


@pytest.mark.parametrize("kind", ["raise", "nan"])
def test_a_fault_is_its_request_s_own(watched: RunningServer, kind: str) -> None:
    alone = asked(watched).json()["choices"][0]["token_ids"]
    fault = {"fault": {"kind": kind, "after_tokens": 3}, "prompt": "Another plumduff"}
    with ThreadPoolExecutor() as pool:
        good, bad = pool.map(lambda more: asked(watched, **more), ({}, fault))
    assert good.json()["choices"][0]["token_ids"] == alone
    assert (bad.status_code, bad.json()["error"]["code"]) == (500, "internal_error")
    assert httpx.get(f"{watched.url}/health", trust_env=False).json() == {"status": "ok"}


def test_a_forced_preemption_changes_no_token(watched: RunningServer) -> None:
    runs = [asked(watched, **more).json()["choices"][0]["token_ids"] for more in ({}, {"fault": {"kind": "preempt"}})]
    assert runs[0] == runs[1]


def test_nothing_goes_out_and_no_secret_into_the_log(watched: RunningServer) -> None:
    refused = httpx.post(watched.url + COMP, json=TALE, headers={"authorization": "Bearer sk-three"}, trust_env=False)
    assert refused.status_code == 401
    assert asked(watched, temperature=9).status_code == 400
    answer = asked(watched)
    lines = log_with(watched, answer.json()["id"])
    assert [line for line in lines if line.startswith("OUTBOUND")] == ["OUTBOUND socket.connect"]
    records = [json.loads(line) for line in lines if not line.startswith("OUTBOUND")]
    last = next(record for record in records if record.get("response_id") == answer.json()["id"])
    assert (last["request_id"], last["status"], last["completion_tokens"]) == ("label-7", 200, 12)
    for secret in ("plumduff", "sk-one", "sk-two", "sk-three", answer.json()["choices"][0]["text"].strip()):
        assert secret not in watched.log.read_text()


def test_a_second_signal_stops_at_once(watched: RunningServer) -> None:
    """The last test of this server. One request is running, and would go on for the whole drain timeout."""
    body = {"prompt": "x", "max_tokens": 5000, "ignore_eos": True, "stream": True}
    headers = {"authorization": "Bearer sk-one"}
    with httpx.stream("POST", watched.url + COMP, json=body, headers=headers, timeout=60, trust_env=False) as answer:
        lines = answer.iter_lines()
        next(lines)
        watched.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert watched.process.poll() is None
        assert httpx.get(f"{watched.url}/ready", trust_env=False).status_code == 503
        watched.process.send_signal(signal.SIGINT)
        assert watched.process.wait(30) == 0  # the drain would take 100 seconds

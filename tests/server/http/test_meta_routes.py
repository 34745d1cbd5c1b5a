"""Everything around generation: health, keys, CORS, request ids, bodies, unknown paths."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from verdraft.server.logs import set_up_logs
from verdraft.server.tokenizer import TextTokenizer

ERROR_KEYS = {"message", "type", "param", "code"}


def error_of(answer: httpx.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert set(error) == ERROR_KEYS
    return answer.status_code, error["code"]


async def test_before_the_model_is_loaded(stage: Any) -> None:
    async with stage(loaded=False) as s:
        for path in ("/health", "/ready", "/v1/models", "/server_info"):
            answer = await s.client.get(path)
            assert error_of(answer) == (503, "loading")
            assert int(answer.headers["retry-after"]) >= 1
        posted = await s.client.post("/v1/completions", json={"prompt": "x"})
        assert error_of(posted) == (503, "loading")
        assert (await s.client.get("/metrics")).status_code == 200
        assert (await s.client.get("/version")).status_code == 200


@pytest.mark.parametrize(
    ("state", "code"), [("dead", "engine_dead"), ("stuck", "engine_stuck"), ("failing", "engine_stuck")]
)
async def test_health_tells_the_truth(stage: Any, state: str, code: str) -> None:
    async with stage() as s:
        assert (await s.client.get("/health")).json() == {"status": "ok"}
        s.engine.state = state
        assert error_of(await s.client.get("/health")) == (503, code)


async def test_unknown_paths_and_methods(stage: Any) -> None:
    async with stage() as s:
        assert error_of(await s.client.post("/v1/chat", json={})) == (404, "not_found")
        assert error_of(await s.client.get("/v1/models/")) in [(404, "not_found"), (404, "model_not_found")]
        for method, path in (("GET", "/v1/completions"), ("POST", "/health"), ("DELETE", "/v1/models")):
            assert error_of(await s.client.request(method, path)) == (405, "method_not_allowed")


async def test_models(stage: Any) -> None:
    async with stage() as s:
        card = (await s.client.get("/v1/models/org/demo")).json()
        assert (await s.client.get("/v1/models")).json() == {"object": "list", "data": [card]}
        assert error_of(await s.client.get("/v1/models/org/other")) == (404, "model_not_found")
    expected = {"id": "org/demo", "object": "model", "created": 7, "owned_by": "verdraft", "max_model_len": 200}
    assert card == expected


async def test_tokenize_and_detokenize(stage: Any) -> None:
    async with stage() as s:
        answer = (await s.client.post("/tokenize", json={"prompt": "the th\u00e9"})).json()
        back = await s.client.post("/detokenize", json={"tokens": answer["tokens"]})
        chat = (await s.client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
        await s.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert back.json() == {"prompt": "the th\u00e9"}
    assert answer["count"] == len(answer["tokens"])
    assert list(s.engine.requests[0].prompt) == chat["tokens"]


async def test_server_info_and_reset(stage: Any) -> None:
    async with stage(api_key="sk-secret", activations="int8") as s:
        s.client.headers["authorization"] = "Bearer sk-secret"
        info = await s.client.get("/server_info")
        assert (await s.client.post("/reset_prefix_cache", json={})).json() == {}
    assert "sk-secret" not in info.text
    assert info.json()["speculation_modes"] == ["auto", "off", "suffix"]
    assert (info.json()["quantization"], info.json()["activations"]) == ("auto", "int8")
    assert s.engine.resets == 1


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", "Basic sk-secret", "", "sk-secret"])
async def test_wrong_keys(stage: Any, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    async with stage(api_key="sk-secret") as s:
        for path in ("/v1/models", "/nope", "/version"):
            answer = await s.client.get(path, headers=headers)
            assert error_of(answer) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/metrics"):
            assert (await s.client.get(path, headers=headers)).status_code == 200


async def test_any_of_several_keys_opens(stage: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\nsk-one\n\nsk-two\n")
    tried = ("sk-one", "sk-two", "sk-three", "", "sk-one, sk-two", "# ours", "sk-\u00fc")
    for given in ("sk-one, sk-two", f"@{tmp_path}/keys"):
        async with stage(api_key=given) as s:
            headers = [{"authorization": f"Bearer {key}".encode("latin-1")} for key in tried]
            found = [(await s.client.get("/version", headers=each)).status_code for each in headers]
        assert found == [200, 200, 401, 401, 401, 401, 401]


async def test_cors(stage: Any) -> None:
    ask = {"origin": "http://a.test", "access-control-request-method": "POST"}
    async with stage(api_key="sk-secret") as s:
        preflight = await s.client.options("/v1/completions", headers=ask)
        refused = await s.client.get("/v1/models", headers={"origin": "http://a.test"})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "*"
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(("sent", "kept"), [("trace 1/a", True), ("x" * 128, True), ("x" * 129, False), ("", False)])
async def test_request_ids(stage: Any, sent: str, kept: bool) -> None:
    async with stage() as s:
        answers = [await s.client.get(path, headers={"x-request-id": sent}) for path in ("/version", "/nope")]
    for answer in answers:
        found = answer.headers["x-request-id"]
        assert (found == sent) is kept
        assert 0 < len(found) <= 128


async def test_bodies_over_the_limit(stage: Any) -> None:
    async def pieces() -> Any:
        for _ in range(40):
            yield b"x" * 100

    async with stage(max_body_bytes=2000) as s:
        for path in ("/v1/completions", "/tokenize"):
            for content in (b"x" * 2001, pieces()):
                answer = await s.client.post(path, content=content, headers={"content-type": "application/json"})
                assert error_of(answer) == (413, "request_too_large")
        assert s.engine.requests == []


@pytest.mark.parametrize("format", ["text", "json"])
async def test_one_log_line_without_secrets(stage: Any, format: str, capsys: pytest.CaptureFixture[str]) -> None:
    with logging_as(format):
        async with stage(api_key="sk-secret") as s:
            headers = {"authorization": "Bearer sk-secret", "x-request-id": "label-1"}
            await s.client.post("/v1/completions?q=plumduff", json={"prompt": "plumduff"}, headers=headers)
            await s.client.get("/health")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    for shown in ("label-1", "POST", "/v1/completions", "200", "completion_tokens", "first_token_seconds", "cmpl-"):
        assert shown in lines[0]
    for secret in ("plumduff", "sk-secret", "Hello"):
        assert secret not in lines[0]
    if format == "json":
        line = json.loads(lines[0])
        assert (line["request_id"], line["status"], line["finish_reason"]) == ("label-1", 200, "stop")
        assert line["prompt_tokens"] > 0


async def test_what_fails_in_a_worker_thread_is_logged_with_the_request(
    stage: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        logging.getLogger("some.library").warning("from a thread")
        raise RuntimeError("plum" + "duff")

    monkeypatch.setattr(TextTokenizer, "encode_prompt", fail)
    with logging_as("json"):
        async with stage() as s:
            answer = await s.client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "label-2"})
    assert error_of(answer) == (500, "internal_error")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["request_id"] for line in lines] == ["label-2"] * 3
    assert "plumduff" not in json.dumps(lines)


@contextmanager
def logging_as(format: Any) -> Iterator[None]:
    """The root logger as the command sets it up."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = []
    try:
        set_up_logs("info", format)
        yield
    finally:
        root.handlers = handlers
        root.setLevel(level)

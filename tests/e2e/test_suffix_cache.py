"""Finished answers outlive a server, if asked, and bring drafts to the next one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.demo  # for `launch`

RunningServer = Any  # conftest's class: a server with .url and .process
ASK = {"prompt": [5, 90, 7, 33, 200, 14], "max_tokens": 60, "temperature": 1.3, "seed": 4, "ignore_eos": True}


@pytest.fixture
def model(tiny_llama_path: Path, byte_level_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama_path, folder)
    shutil.copy(byte_level_folder / "tokenizer.json", folder)
    return folder


def answer(server: RunningServer, **more: str) -> tuple[list[int], int]:
    """Token ids, and how many of them were accepted from suffix drafts."""
    body = {**ASK, "return_token_ids": True, "return_speculation": True, "speculation": "suffix", **more}
    found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False).json()
    sources = found["speculation"]["sources"]
    return found["choices"][0]["token_ids"], sources.get("suffix", {}).get("num_accepted_draft_tokens", 0)


def test_answers_outlive_a_restart(launch: Callable[..., RunningServer], model: Path, tmp_path: Path) -> None:
    file = tmp_path / "answers"
    flags = (str(model), "--kv-blocks", "64", "--suffix-cache", str(file), "--log-format", "json")
    first = launch(*flags).wait_ready()
    tokens, accepted = answer(first)
    assert answer(first, cache_salt="plumduff")[0] == tokens
    assert first.stop() == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert b"plumduff" not in file.read_bytes()

    second = launch(*flags).wait_ready()
    messages = [json.loads(line)["message"] for line in second.log.read_text().splitlines()]
    assert any(f"tokens of finished answers from {file}" in message for message in messages)
    again = [answer(second, **salt) for salt in ({}, {"cache_salt": "plumduff"}, {"cache_salt": "other"})]
    assert [found for found, _ in again] == [tokens] * 3
    assert again[0][1] > accepted + 20
    assert again[1][1] > accepted + 20
    assert again[2][1] == accepted

"""The overhead measurement's judgement, its reader, and the model that it runs on."""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest
import torch

from verdraft.bench.overhead import main_thread_seconds, problems, request, stream
from verdraft.bench.tiny import tiny_model
from verdraft.model.config import read_config
from verdraft.model.weights import open_weights


def test_problems() -> None:
    def result(cost: float, late: float) -> dict[str, dict[str, float]]:
        return {"per_token": {"cpu_microseconds_per_token": cost}, "first_chunk": {"around_milliseconds": late}}

    assert problems(result(49, 1.9)) == []
    assert problems(result(51, 2.5)) == ["51.0 us of CPU time per token", "the first chunk takes 2.50 ms"]


async def test_a_stream_is_read_to_its_end_and_its_first_content_is_timed() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = json.loads(await reader.readexactly(int(head.rpartition(b": ")[2])))
        assert body["stream"]
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.sleep(0.05)
        writer.write(b"data: {}\n\n")
        await asyncio.sleep(0.05)
        writer.write(b"data: [DONE]\n\n" if body["max_tokens"] == 3 else b"")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        reader = await stream(url, 3)
        assert reader.first - reader.sent > 0.04
        with pytest.raises(RuntimeError, match="did not end well"):
            await stream(url, 4)


def test_the_main_thread_s_time_grows_with_its_work() -> None:
    before, deadline = main_thread_seconds(os.getpid()), time.monotonic() + 20
    while time.monotonic() < deadline and main_thread_seconds(os.getpid()) < before + 0.02:
        request(1)
    assert before + 0.02 <= main_thread_seconds(os.getpid()) < before + 20


@pytest.mark.demo
def test_the_tiny_model_loads(tmp_path: Path) -> None:
    config = read_config(tiny_model(tmp_path))
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (2, 32, 49152)
    with open_weights(tmp_path, torch.float32, torch.device("cpu")) as weights:
        assert weights.take("model.layers.1.self_attn.k_proj.weight", 16, 32).std() > 0.1

"""What the server itself costs: CPU time per streamed token outside the engine, and how late a first chunk leaves.

    python -m verdraft.bench.overhead --streams 64 --out build/overhead

The server is a real one, around a model that costs nearly nothing. Its event loop runs in the main thread of its
process and the engine in another, so the main thread's CPU time is JSON, SSE, detokenising and writing to sockets.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from verdraft.bench.client import CHAT
from verdraft.bench.host import Host, started
from verdraft.bench.soak import gauges
from verdraft.bench.tiny import tiny_model

MAX_TOKEN_MICROSECONDS = 50.0
MAX_FIRST_CHUNK_MILLISECONDS = 2.0
PROMPT_TOKENS = 64  # room for the prompt of BODY
BODY = {
    "messages": [{"role": "user", "content": "Tell me a long story."}],
    "temperature": 0,
    "ignore_eos": True,
    "speculation": "off",  # one token a step and a write for each: what costs most
}


class Reader(asyncio.Protocol):
    """Sends one request and reads the answer to the end of the connection, as cheaply as can be."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.tail = b""
        self.sent = self.first = 0.0  # time.perf_counter() seconds; `first`: of the first content
        self.num_reads = 0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self.request)
        self.sent = time.perf_counter()

    def data_received(self, data: bytes) -> None:
        self.first = self.first or (time.perf_counter() if b"data: " in data else 0.0)
        self.num_reads += 1
        self.tail = data[-64:] if len(data) >= 64 else (self.tail + data)[-64:]

    def connection_lost(self, _: Exception | None) -> None:
        self.ended.set_result(None)


def request(num_tokens: int) -> bytes:
    """A streamed chat of exactly `num_tokens` tokens, as it goes over the wire."""
    body = json.dumps({**BODY, "max_tokens": num_tokens, "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def stream(url: str, num_tokens: int) -> Reader:
    """One stream, read to its end."""
    where = urlsplit(url)
    assert where.hostname is not None
    assert where.port is not None
    loop = asyncio.get_running_loop()
    _, reader = await loop.create_connection(lambda: Reader(request(num_tokens)), where.hostname, where.port)
    await reader.ended
    if b"data: [DONE]" not in reader.tail:
        raise RuntimeError(f"a stream did not end well: {reader.tail!r}")
    return reader


def main_thread_seconds(pid: int) -> float:
    """CPU time, user and system, of a process's main thread."""
    return sum(thread.user_time + thread.system_time for thread in psutil.Process(pid).threads() if thread.id == pid)


async def per_token(host: Host, num_streams: int, num_tokens: int) -> dict[str, float]:
    """Many streams at once."""
    assert host.pid is not None
    cpu, start = main_thread_seconds(host.pid), time.perf_counter()
    readers = await asyncio.gather(*(stream(host.url, num_tokens) for _ in range(num_streams)))
    seconds, cpu = time.perf_counter() - start, main_thread_seconds(host.pid) - cpu
    total = num_streams * num_tokens
    return {
        "tokens": total,
        "tokens_per_second": total / seconds,
        "chunks_read": sum(reader.num_reads for reader in readers),
        "cpu_seconds": cpu,
        "cpu_microseconds_per_token": 1e6 * cpu / total,
    }


async def first_chunk(host: Host, repeats: int) -> dict[str, float]:
    """One stream at a time: the client's time to the first chunk less the engine's own (arrival to commit).

    An upper bound of commit to chunk: the way of the request into the server is in it too.
    """
    name = "verdraft_time_to_first_token_seconds_sum"
    async with httpx.AsyncClient(base_url=host.url) as client:
        before = (await gauges(client))[name]
        readers = [await stream(host.url, 1) for _ in range(repeats)]
        engine = ((await gauges(client))[name] - before) / repeats
    client_seconds = mean(reader.first - reader.sent for reader in readers)
    return {
        "client_milliseconds": 1e3 * client_seconds,
        "until_commit_milliseconds": 1e3 * engine,
        "around_milliseconds": 1e3 * (client_seconds - engine),
    }


async def measure(args: argparse.Namespace, host: Host) -> dict[str, Any]:
    """Everything, after a round that warms the server up."""
    await per_token(host, args.streams, 16)
    return {
        "streams": args.streams,
        "per_token": await per_token(host, args.streams, args.tokens),
        "first_chunk": await first_chunk(host, args.repeats),
    }


def problems(result: dict[str, Any]) -> list[str]:
    """Which targets were missed."""
    cost, late = result["per_token"]["cpu_microseconds_per_token"], result["first_chunk"]["around_milliseconds"]
    found = [f"{cost:.1f} us of CPU time per token"] if cost > MAX_TOKEN_MICROSECONDS else []
    return found + ([f"the first chunk takes {late:.2f} ms"] if late > MAX_FIRST_CHUNK_MILLISECONDS else [])


def flags(args: argparse.Namespace, model: Path) -> Sequence[str]:
    blocks = args.streams * -(-(args.tokens + PROMPT_TOKENS) // 16)
    return (str(model), "--max-num-seqs", str(args.streams), "--kv-blocks", str(blocks), "--threads", "1")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="verdraft.bench.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64, help="streams at a time")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of each stream")
    parser.add_argument("--repeats", type=int, default=200, help="first chunks to time")
    parser.add_argument("--out", default="build/overhead", help="writes OUT.json")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder, started(flags(args, tiny_model(Path(folder)))) as host:
        result = asyncio.run(measure(args, host))
    result["problems"] = problems(result)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{args.out}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return int(bool(result["problems"]))


if __name__ == "__main__":
    sys.exit(main())

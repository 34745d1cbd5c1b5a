"""The peers: how each is started, asked and stopped, and what it really runs. Measures nothing over many answers."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx
from transformers import AutoTokenizer

from verdraft.bench.client import CHAT, BadAnswer, events, new_client
from verdraft.bench.host import free_port, served_by
from verdraft.bench.peer_prompts import Messages
from verdraft.bench.peer_report import OURS, Timing
from verdraft.bench.peer_setup import LLAMACPP, OPENVINO, VLLM, Places
from verdraft.bench.transformers_baseline import Baseline, prompt_ids, running
from verdraft.model.source import resolve_model

TRANSFORMERS = "transformers"
NAMES = (OURS, LLAMACPP, OPENVINO, TRANSFORMERS, VLLM)
CONTEXT = 2048  # tokens of one stream
_STOPPED = (0, -15, 143)  # exit codes of servers that take SIGTERM for what it is


class Peer(Protocol):
    """A started peer."""

    async def ask(self, prompts: Sequence[Messages], max_tokens: int, ignore_eos: bool) -> list[Timing]:
        """Answers to all prompts at once, greedily. One prompt alone is timed token by token."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the run decides for every peer."""

    places: Places
    threads: int
    slots: int  # streams at a time


@dataclass(frozen=True, slots=True)
class Kind:
    """One peer in one configuration. `batches` is False where only single streams can be measured."""

    peer: str
    speculation: str
    precision: str
    start: Callable[[Setting], AbstractContextManager[Peer]]
    batches: bool = True


@dataclass(slots=True)
class HttpPeer:
    """Any server with the OpenAI chat API. `extras` are fields of its own that keep earlier answers from helping."""

    url: str
    extras: Callable[[], dict[str, Any]]

    async def ask(self, prompts: Sequence[Messages], max_tokens: int, ignore_eos: bool) -> list[Timing]:
        fields = {"max_tokens": max_tokens, "ignore_eos": ignore_eos, "temperature": 0, **self.extras()}
        async with new_client(self.url) as client:
            return list(await asyncio.gather(*(self._stream(client, {"messages": p, **fields}) for p in prompts)))

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Timing:
        """The first chunk with text is the first token; the finish reason comes with the last."""
        usage: dict[str, int] = {}
        start, first, last = time.perf_counter(), 0.0, 0.0
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", CHAT, json=body) as response:
            async for event in events(response):
                now = time.perf_counter() - start
                for choice in event["choices"]:
                    first = first or (now if choice["delta"].get("content") else 0.0)
                    last = now
                usage = event.get("usage") or usage
        if not usage or not first:
            raise BadAnswer("the stream has no text, or no usage")
        return Timing(usage["prompt_tokens"], usage["completion_tokens"], first, last - first)


@dataclass(slots=True)
class PipePeer:
    """A program that reads a request as a line of JSON and answers with a line of JSON, such as peer_openvino."""

    process: "subprocess.Popen[str]"

    async def ask(self, prompts: Sequence[Messages], max_tokens: int, ignore_eos: bool) -> list[Timing]:
        request = {"prompts": list(map(list, prompts)), "max_tokens": max_tokens, "ignore_eos": ignore_eos}
        line = await asyncio.to_thread(self._exchange, json.dumps(request))
        return [Timing(**row) for row in json.loads(line)]

    def _exchange(self, request: str) -> str:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(request + "\n")
        stdin.flush()
        if not (line := stdout.readline()):
            raise BadAnswer("the program has ended; its message is on stderr")
        return line


@dataclass(slots=True)
class TransformersPeer:
    """transformers' own `generate`, one prompt at a time."""

    baseline: Baseline
    tokenizer: Any = field(default_factory=lambda: AutoTokenizer.from_pretrained(resolve_model(None)))

    async def ask(self, prompts: Sequence[Messages], max_tokens: int, ignore_eos: bool) -> list[Timing]:
        assert len(prompts) == 1
        assert not ignore_eos
        ids = prompt_ids(self.tokenizer, list(prompts[0]))
        answer = await asyncio.to_thread(self.baseline.ask, ids, max_tokens)
        return [Timing(len(ids), len(answer.ids), answer.ttft, answer.decode_time)]


def kinds() -> list[Kind]:
    """Every peer in every configuration, verdraft first."""
    f32 = "float32 weights and KV cache"
    f16 = "float16 weights (its GGUF reader takes no float32), float32 arithmetic and KV cache; offline, no server"
    vllm = f"{f32}, compiled"
    return [
        Kind(OURS, "none", f32, partial(_verdraft, mode="off")),
        Kind(OURS, "suffix", f32, partial(_verdraft, mode="suffix")),
        Kind(OURS, "hybrid", f32, partial(_verdraft, mode="hybrid")),
        Kind(LLAMACPP, "none", f32, partial(_llamacpp, ngram=0)),
        Kind(LLAMACPP, "n-gram 12 to 48", f"{f32}; its own sizes", partial(_llamacpp, ngram=12)),
        Kind(LLAMACPP, "n-gram 4 to 12", f"{f32}; sizes that suit edits", partial(_llamacpp, ngram=4, draft=12)),
        Kind(OPENVINO, "none", f16, partial(_openvino, draft=0)),
        Kind(OPENVINO, "prompt lookup 3 to 5", f16, partial(_openvino, draft=5)),
        Kind(TRANSFORMERS, "none", "float32; offline, no server", _transformers, batches=False),
        Kind(VLLM, "none", vllm, partial(_vllm, draft=0)),
        Kind(VLLM, "n-gram 2-5 to 5", vllm, partial(_vllm, draft=5)),
    ]


@contextmanager
def _http(
    command: Sequence[str], port: int, ready: str, extras: Callable[[], dict[str, Any]], env: dict[str, str]
) -> Iterator[Peer]:
    with served_by(command, f"http://127.0.0.1:{port}", ready, env, _STOPPED) as host:
        yield HttpPeer(host.url, extras)


def _verdraft(setting: Setting, mode: str) -> AbstractContextManager[Peer]:
    port = free_port()
    flags = {"speculation": mode, "threads": setting.threads, "max-num-seqs": setting.slots, "port": port}
    command = [sys.executable, "-m", "verdraft", "serve", *(f"--{name}={value}" for name, value in flags.items())]
    return _http(command, port, "/ready", lambda: {"cache_salt": f"peers-{time.time_ns()}"}, {})


def _llamacpp(setting: Setting, ngram: int, draft: int = 48) -> AbstractContextManager[Peer]:
    port, places = free_port(), setting.places
    flags = {"port": port, "threads": setting.threads, "slots": setting.slots, "context": CONTEXT}
    flags |= {"ngram": ngram, "draft": draft}
    command = _script(places.program(LLAMACPP, "python"), "peer_llamacpp.py", places.gguf_float32, flags)
    return _http(command, port, "/health", lambda: {"cache_prompt": False}, {})


def _vllm(setting: Setting, draft: int) -> AbstractContextManager[Peer]:
    port = free_port()
    flags = {"dtype": "float32", "max-num-seqs": setting.slots, "max-model-len": CONTEXT, "port": port}
    command = [str(setting.places.program(VLLM, "python")), "-m", "vllm.entrypoints.openai.api_server"]
    command += [f"--model={resolve_model(None)}", "--host=127.0.0.1", "--no-enable-prefix-caching"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    ngram = {"method": "ngram", "num_speculative_tokens": draft, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    command += ["--speculative-config", json.dumps(ngram)] if draft else []
    threads = {"OMP_NUM_THREADS": str(setting.threads), "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}"}
    env = {**threads, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return _http(command, port, "/health", dict, env)


@contextmanager
def _openvino(setting: Setting, draft: int) -> Iterator[Peer]:
    places = setting.places
    flags = {"threads": setting.threads, "slots": setting.slots, "draft": draft}
    command = _script(places.program(OPENVINO, "python"), "peer_openvino.py", places.gguf_float16, flags)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield PipePeer(process)
        # leaving the block closes stdin, which ends the process


@contextmanager
def _transformers(setting: Setting) -> Iterator[Peer]:
    with running(None, setting.threads) as baseline:
        yield TransformersPeer(baseline)


def _script(python: Path, name: str, model: Path, flags: dict[str, Any]) -> list[str]:
    script = Path(__file__).resolve().with_name(name)
    return [str(python), str(script), str(model), *(f"--{flag}={value}" for flag, value in flags.items())]

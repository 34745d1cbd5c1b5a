"""A small real model for scheduler tests: its logits are a hash of the whole context as read back from the KV pool.

Any wrong slot, stale row, lost block or shared block that was written to changes the output, in microseconds.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verdraft.kernels.base import Batch
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.outputs import TokenSlice
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Request
from verdraft.spec.draft import EMPTY, Draft

VOCAB = 48
EOS = 0


class HashModel:
    """embed -> forward -> logits like a Transformer; KV holds token ids, attention is a hash of all of them."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.config = SimpleNamespace(num_layers=2, vocab_size=VOCAB)
        self.passes = 0

    def new_pool(self, num_blocks: int, block_size: int) -> torch.Tensor:
        self.block_size = block_size
        return torch.full((num_blocks * block_size,), -1, dtype=torch.int64)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert len(tokens) == len(positions)
        return tokens

    def forward(self, hidden: torch.Tensor, batch: Batch, pool: torch.Tensor, first: int, last: int) -> torch.Tensor:
        assert (first, last) == (0, 2)
        self.passes += 1
        pool[batch.slots] = hidden
        hashes = []
        for b in range(len(batch.seq_lens)):
            length = int(batch.seq_lens[b])
            offsets = torch.arange(length)
            slots = batch.pages[b].long()[offsets // self.block_size] * self.block_size + offsets % self.block_size
            context = pool[slots].tolist()
            queries = int(batch.cu_q[b + 1] - batch.cu_q[b])
            assert batch.positions[batch.cu_q[b]] == length - queries
            hashes += [hash(tuple(context[: i + 1])) for i in range(length - queries, length)]
        return torch.tensor(hashes)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.stack([_row(int(h)) for h in hidden])) if len(hidden) else torch.empty(0, VOCAB)


def _row(value: int) -> np.ndarray:
    return np.random.default_rng(value % 2**63).normal(scale=2.0, size=VOCAB).astype(np.float32)


class ScriptedDrafter:
    """Knows the continuation and lies about some of it: `wrong` is the chance of each drafted token to be wrong."""

    def __init__(self, answer: Sequence[int], wrong: float, seed: int) -> None:
        self.answer, self.wrong, self.random = list(answer), wrong, random.Random(seed)
        self.done = 0
        self.started = False

    def start(self, prompt: Sequence[int]) -> None:
        assert not self.started
        self.started = True

    def extend(self, tokens: Sequence[int]) -> None:
        assert list(tokens) == self.answer[self.done : self.done + len(tokens)]
        self.done += len(tokens)

    def propose(self, limit: int) -> Draft:
        ahead = self.answer[self.done : self.done + self.random.randint(0, limit)]
        lies = (self.random.randrange(VOCAB) if self.random.random() < self.wrong else t for t in ahead)
        return Draft(tuple(lies), probs=(1.0,) * len(ahead)) if ahead else EMPTY

    def stop(self) -> None:
        self.started = False


@dataclass
class Finished:
    """All slices of one request, joined."""

    tokens: list[int]
    finish: str | None
    slices: list[TokenSlice]


def run_until_idle(engine: Engine, requests: Sequence[Request] = (), limit: int = 5000) -> dict[str, Finished]:
    """Step until nothing is left; the joined output per request id."""
    found = {request.id: Finished([], None, []) for request in requests}
    for _ in range(limit):
        if not engine.has_work:
            break
        for request, piece in engine.step():
            entry = found.setdefault(request.id, Finished([], None, []))
            assert entry.finish is None
            entry.tokens += piece.tokens
            entry.finish = piece.finish
            entry.slices.append(piece)
        engine.check_integrity()
    assert not engine.has_work
    assert engine.counters().kv_blocks_used == 0
    return found


def build_request(name: str, prompt: Sequence[int], **fields: object) -> Request:
    params = {key: fields.pop(key) for key in list(fields) if key in SamplingParams.__dataclass_fields__}
    params.setdefault("temperature", 0.0)
    return Request(id=name, prompt=list(prompt), params=SamplingParams(**params), **fields)


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    def build(**fields: object) -> Engine:
        drafters = fields.pop("drafter_factory", None)
        settings = {"max_model_len": 256, "num_blocks": 64, "block_size": 4, "max_batch_tokens": 32}
        settings["suffix_store_tokens"] = 2000
        settings |= {"eos_token_ids": frozenset({EOS}), "max_num_seqs": 8} | fields
        return Engine(HashModel(), EngineConfig(**settings), drafters)

    return build


@pytest.fixture
def drain() -> Callable[..., dict[str, Finished]]:
    return run_until_idle


@pytest.fixture
def make_request() -> Callable[..., Request]:
    return build_request


@pytest.fixture
def scripted() -> type[ScriptedDrafter]:
    return ScriptedDrafter

"""A small real model for scheduler tests: every layer's output is a hash of the whole context as read back from that
layer's KV pool.

Any wrong slot, stale row, lost block or shared block that was written to changes the output, in microseconds.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verdraft.kernels.base import Batch
from verdraft.kernels.tree import paths
from verdraft.model.exit_head import Exits
from verdraft.scheduler.config import DraftShape, EngineConfig
from verdraft.scheduler.device import Device, HostDevice
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.outputs import TokenSlice
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Request

VOCAB = 48
EOS = 0


class HashModel:
    """embed -> forward -> logits like a Transformer; the KV of layer 0 holds token ids, that of the others hashes."""

    device = torch.device("cpu")
    exact = True

    def __init__(self, num_layers: int = 2) -> None:
        self.config = SimpleNamespace(num_layers=num_layers, vocab_size=VOCAB, hidden_size=1)
        self.kernels = self
        self.before_forward: Callable[[], None] = lambda: None
        self.prefixes: dict[int, tuple[int, ...]] = {}

    def new_pool(self, num_blocks: int, block_size: int) -> torch.Tensor:
        self.block_size = block_size
        return torch.full((self.config.num_layers, num_blocks * block_size), -1, dtype=torch.int64)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert len(tokens) == len(positions)
        return tokens[:, None]

    def forward(self, hidden: torch.Tensor, batch: Batch, pool: torch.Tensor, first: int, last: int) -> torch.Tensor:
        self.before_forward()
        for layer in range(first, last):
            pool[layer, batch.slots] = hidden[:, 0]
            contexts = list(self.contexts(batch, pool[layer]))
            hashes = [hash(context) for context in contexts]
            for value, below, context in zip(hashes, hidden[:, 0].tolist(), contexts, strict=True):
                self.prefixes[value] = self.prefixes[below] if layer else context
            hidden = torch.tensor(hashes)[:, None]
        return hidden

    def check(self) -> None: ...

    def write_kv(self, hidden: torch.Tensor, batch: Batch, pool: torch.Tensor, layer: int) -> None:
        pool[layer, batch.slots] = hidden[:, 0]

    def streams(
        self, hidden: torch.Tensor, batch: Batch, pool: torch.Tensor, first: int, last: int, taps: Sequence[int]
    ) -> list[torch.Tensor]:
        kept = []
        for layer in taps:
            hidden, first = self.forward(hidden, batch, pool, first, layer), layer
            kept.append(hidden)
        return [*kept, self.forward(hidden, batch, pool, first, last)]

    def contexts(self, batch: Batch, layer_kv: torch.Tensor) -> Iterator[tuple[int, ...]]:
        for b in range(len(batch.seq_lens)):
            length = int(batch.seq_lens[b])
            offsets = torch.arange(length)
            slots = batch.pages[b].long()[offsets // self.block_size] * self.block_size + offsets % self.block_size
            context = layer_kv[slots].tolist()
            first, last = int(batch.cu_q[b]), int(batch.cu_q[b + 1])
            start = length - (last - first)
            parents = batch.parents[first:last].tolist() or range(-1, last - first - 1)
            for query, path in enumerate(paths(parents), first):
                assert batch.positions[query] == start + len(path) - 1
                yield (*context[:start], *(context[start + node] for node in path))

    def move(self, pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        pool[:, targets] = pool[:, sources]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (
            torch.from_numpy(np.stack([_row(h) for h in hidden[:, 0].tolist()]))
            if len(hidden)
            else torch.empty(0, VOCAB)
        )

    @lru_cache(maxsize=1000)  # noqa: B019
    def states(self, tokens: tuple[int, ...]) -> list[list[int]]:
        """What each layer's KV must hold for these tokens, and last what comes out of the model."""
        levels = [list(tokens)]
        for _ in range(self.config.num_layers):
            levels.append([hash(tuple(levels[-1][: i + 1])) for i in range(len(tokens))])
        return levels

    def final_row(self, value: int) -> np.ndarray:
        """The target's logits at the position that some layer's output belongs to."""
        return _row(self.states(self.prefixes[value])[-1][-1])


@dataclass
class HashHead:
    """An exit that says what the model will say for a share `agree` of all positions, and nonsense for the others."""

    model: HashModel
    layer: int
    agree: float
    token_ids: np.ndarray

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return _logits(self._row(value)[self.token_ids] for value in hidden[:, 0].tolist())

    def _row(self, value: int) -> np.ndarray:
        lot = random.Random(hash((value, self.layer))).random()
        return self.model.final_row(value) if lot < self.agree else _row(hash((value, "nonsense")) + self.layer)


class HashEagle:
    """An EAGLE head that says what the model will say for a share `agree` of all positions, and nonsense elsewhere.

    Its KV of row t is a hash of tokens 0 to t + 1, and every pass compares all rows that it sees.
    """

    embedding = torch.empty(0)

    def __init__(self, model: HashModel, agree: float, vocabulary: int) -> None:
        self.model, self.agree, self.token_ids = model, agree, np.arange(vocabulary)
        self.config = SimpleNamespace(aux_layers=tuple(range(1, model.config.num_layers)))
        self.prefixes: dict[int, tuple[int, ...]] = {}

    def new_pool(self, num_blocks: int, block_size: int) -> list[torch.Tensor]:
        return [torch.full((num_blocks * block_size,), -1, dtype=torch.int64)]

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        for values in aux.tolist():
            assert len({self.model.prefixes[value] for value in values}) == 1
        self.prefixes |= {value: self.model.prefixes[value] for value in aux[:, 0].tolist()}
        return aux[:, :1]

    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, batch: Batch, pool: list[torch.Tensor]
    ) -> torch.Tensor:
        pairs = zip(features[:, 0].tolist(), tokens.tolist(), strict=True)
        known = [(*self.prefixes[feature], token) for feature, token in pairs]
        pool[0][batch.slots] = torch.tensor([hash(prefix) for prefix in known])
        for prefix, context in zip(known, self.model.contexts(batch, pool[0]), strict=True):
            for end, value in zip(range(len(prefix), 0, -1), reversed(context), strict=False):
                # The row of a reused block's last token saw what came behind it in the first sequence.
                assert value == hash(prefix[:end]) or (end - 1) % self.model.block_size == 0
        outputs = [hash(("output", *prefix)) for prefix in known]
        self.prefixes |= dict(zip(outputs, known, strict=True))
        return torch.tensor(outputs)[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return _logits(self._row(self.prefixes[value])[self.token_ids] for value in hidden[:, 0].tolist())

    def _row(self, prefix: tuple[int, ...]) -> np.ndarray:
        right = random.Random(hash((prefix, "eagle"))).random() < self.agree
        return _row(self.model.states(prefix)[-1][-1]) if right else _row(hash((prefix, "nonsense")))


def _logits(rows: Iterable[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(list(rows)))


def _row(value: int) -> np.ndarray:
    return np.random.default_rng(value % 2**63).normal(scale=2.0, size=VOCAB).astype(np.float32)


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


@pytest.fixture(params=["host", "late"])
def make_engine(request: pytest.FixtureRequest, late_device: Callable[[], Device]) -> Callable[..., Engine]:
    """Engines whose passes end in the step that begins them, and engines whose passes end in the next. Tests that draw
    examples share them out between the two."""

    def build(**fields: object) -> Engine:
        device = fields.pop("device", None) or (HostDevice() if request.param == "host" else late_device())
        drafters, exits = fields.pop("drafter_factory", None), fields.pop("exits", Exits())
        eagle, shape = fields.pop("eagle", None), DraftShape(*fields.pop("shape", (4, 1, 4)))
        model = fields.pop("model", HashModel())
        settings = {"max_model_len": 256, "num_blocks": 64, "block_size": 4, "max_batch_tokens": 32}
        settings["suffix_store_tokens"] = 2000
        settings |= {"eagle": shape, "eos_token_ids": frozenset({EOS}), "max_num_seqs": 8} | fields
        return Engine(model, EngineConfig(**settings), drafters, exits, eagle, device)

    return build


@pytest.fixture
def drain() -> Callable[..., dict[str, Finished]]:
    return run_until_idle


@pytest.fixture
def make_request() -> Callable[..., Request]:
    return build_request


def check_pool(engine: Engine, model: HashModel) -> None:
    """Bit for bit what plain decoding puts there, in every layer, for all that a segment claims to have computed."""
    pool, size, bounds = engine._runner.pool, engine.config.block_size, engine._runner.bounds
    for seq in engine.scheduler.running:
        levels = model.states(tuple(seq.tokens))
        slots = [block * size + offset for block in seq.blocks for offset in range(size)]
        for segment, (first, last) in enumerate(pairwise(bounds)):
            count = min(seq.computed[segment], len(seq.tokens))
            for layer in range(first, last):
                assert pool[layer, slots[:count]].tolist() == levels[layer][:count]


@pytest.fixture
def watch() -> Callable[[Engine, HashModel], None]:
    """Look at every structure before each pass over any segment, in the middle of windows too."""

    def watch(engine: Engine, model: HashModel) -> None:
        def check() -> None:
            engine.check_integrity()
            check_pool(engine, model)

        model.before_forward = check

    return watch


@pytest.fixture
def exiting() -> Callable[..., dict[str, object]]:
    """exiting(agree of L_d, agree of L_i): keywords for make_engine, a model of four layers with two exits."""

    def build(draft: float, check: float, vocabulary: int = VOCAB) -> dict[str, object]:
        model, ids = HashModel(num_layers=4), np.arange(vocabulary)
        return {"model": model, "exits": Exits((HashHead(model, 1, draft, ids), HashHead(model, 2, check, ids)))}

    return build


@pytest.fixture
def eagle_of() -> Callable[..., HashEagle]:
    """eagle_of(model, agree): an EAGLE head for a HashModel."""

    def build(model: HashModel, agree: float, vocabulary: int = VOCAB) -> HashEagle:
        return HashEagle(model, agree, vocabulary)

    return build


@pytest.fixture
def hash_model() -> type[HashModel]:
    return HashModel

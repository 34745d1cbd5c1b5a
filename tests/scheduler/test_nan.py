"""NaN that a request or a draft leaves in the KV pool reaches nobody, whatever the attention kernel does with it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from verdraft.kernels.base import Batch
from verdraft.kernels.torch_ref import TorchKernels, TorchKV, visible
from verdraft.model.eagle import EagleHead
from verdraft.model.load import load_model
from verdraft.model.transformer import Transformer
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.device import Device, HostDevice
from verdraft.scheduler.engine import Engine

CPU = torch.device("cpu")
POISON = 7  # a token whose embedding is NaN
SPOILS_DRAFTS = 9  # one whose embedding is NaN for the EAGLE head alone
PROMPT = [50, 60, 70, 80, 90]


class Careless(TorchKernels):
    """Multiplies by 0 what a query must not see, up to the end of its last page: NaN there spoils the sum, as in masked
    tiles of flash-attention. In float64, so that no draft changes a token by rounding."""

    def attend(self, q: Tensor, layer_kv: TorchKV, batch: Batch, scale: float) -> Tensor:
        out, size, group = torch.empty_like(q), layer_kv.k.shape[1], q.shape[1] // layer_kv.k.shape[2]
        cu_q = batch.cu_q.tolist()
        for row, length in enumerate(batch.seq_lens.tolist()):
            begin, end = cu_q[row], cu_q[row + 1]
            whole = -(-length // size) * size
            k, v = (x.double().repeat_interleave(group, 1) for x in layer_kv.context(batch.pages[row], whole))
            seen = torch.zeros(end - begin, whole, dtype=torch.bool)
            seen[:, :length] = visible((), end - begin, length)
            scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), k) * scale
            weights = scores.where(seen, -torch.inf).softmax(-1)
            out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v).float()
        return out


@pytest.fixture
@torch.inference_mode()
def model(deep_agreeing_path: Path) -> Transformer:
    found = load_model(deep_agreeing_path, Careless(), torch.float32, CPU)
    found.embedding[POISON] = torch.nan
    return found


@pytest.fixture
@torch.inference_mode()
def eagle(deep_agreeing_path: Path, model: Transformer, first_layer_eagle: Any) -> EagleHead:
    head: EagleHead = first_layer_eagle(deep_agreeing_path, model)
    embedding = head.embedding.clone()
    embedding[SPOILS_DRAFTS] = torch.nan
    return replace(head, embedding=embedding)


@pytest.fixture(params=["host", "late"])
def fresh(
    model: Transformer, eagle: EagleHead, request: pytest.FixtureRequest, late_device: Callable[[], Device]
) -> Iterator[Engine]:
    """Of 5 blocks, so that every request gets those of the one before. Whatever it did, its pools hold no value that
    could spoil a sum."""
    device = HostDevice() if request.param == "host" else late_device()
    config = EngineConfig(max_model_len=64, num_blocks=5, block_size=16, max_num_seqs=4, max_batch_tokens=32)
    engine = Engine(model, config, eagle=eagle, device=device)
    yield engine
    assert engine.drafting.eagle
    assert all(layer.v.isfinite().all() for layer in (*engine._runner.pool, *engine.drafting.eagle._grower.pool))


def answer_of(engine: Engine, drain: Any, make_request: Any, **fields: Any) -> list[int]:
    """Where nobody has left anything, and nobody drafts."""
    engine.add(make_request("alone", PROMPT, max_tokens=20, ignore_eos=True, speculation="off", **fields))
    tokens: list[int] = drain(engine)["alone"].tokens
    assert len(tokens) == 20
    assert POISON not in tokens
    return tokens


def test_a_request_that_fails_leaves_nothing_to_the_next(fresh: Engine, drain: Any, make_request: Any) -> None:
    answer = answer_of(fresh, drain, make_request)
    for _ in range(2):
        fresh.add(make_request("bad", [*PROMPT, *[POISON] * 40], max_tokens=9, ignore_eos=True))
        assert drain(fresh)["bad"].finish == "error"
        assert answer_of(fresh, drain, make_request) == answer
    assert fresh.counters().corrupted == 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_spoils_neither_the_tokens_before_it_nor_the_next_request(
    fresh: Engine, drain: Any, make_request: Any, temperature: float
) -> None:
    params = {"temperature": temperature, "seed": 1}
    answer = answer_of(fresh, drain, make_request, **params)
    plain = fresh.counters().iteration_tokens
    for name in ("a", "b"):
        prediction = [*answer[:4], *[POISON] * 8, *answer[12:]]
        fresh.add(make_request(name, PROMPT, max_tokens=20, ignore_eos=True, prediction=prediction, **params))
        assert drain(fresh)[name].tokens == answer
    assert fresh.counters().iteration_tokens > 2 * plain + 8, "some of it was drafted"
    assert fresh.counters().corrupted == 0


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_request_that_leaves_before_anybody_saw_nan_leaves_nothing(
    fresh: Engine, drain: Any, make_request: Any, steps: int
) -> None:
    answer = answer_of(fresh, drain, make_request)
    request = make_request("bad", [*PROMPT, *[POISON] * 55], max_tokens=2)
    fresh.add(request)
    for _ in range(steps):
        fresh.step()
    fresh.abort(request)
    assert answer_of(fresh, drain, make_request) == answer


def test_what_spoils_an_eagle_head_spoils_it_for_its_sequence_alone(
    fresh: Engine, drain: Any, make_request: Any
) -> None:
    def drafted(name: str, prompt: list[int]) -> int:
        request = make_request(name, prompt, max_tokens=6, ignore_eos=True, speculation="eagle")
        fresh.add(request)
        assert drain(fresh)[name].finish == "length"
        stats = request.stats.sources.get("eagle")
        return stats.num_draft_tokens if stats else 0

    for i in range(3):
        assert drafted(f"spoilt {i}", [i + 10, *[SPOILS_DRAFTS] * 57]) == 0
        assert drafted(f"behind {i}", [i + 20, *PROMPT * 10]) > 0

"""Two processes that share every layer give the token ids of one, in every mode."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from verdraft.kernels.chooser import choose_kernels
from verdraft.model.config import read_config
from verdraft.model.errors import ModelError
from verdraft.model.exit_head import own_exits
from verdraft.model.load import load_model
from verdraft.model.parallel import Job, LeadingTransformer, load_parallel
from verdraft.model.part import Part, check_divides
from verdraft.model.transformer import Transformer
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Request
from verdraft.spec.draft import Drafter, NoDrafter

CPU = torch.device("cpu")
PHRASE = [50, 60, 70, 80, 90]


@pytest.fixture(scope="module")
def alone(deep_agreeing_path: Path) -> Transformer:
    return load_model(deep_agreeing_path, choose_kernels("cpu", CPU, torch.float32), torch.float32, CPU)


@pytest.fixture(scope="module")
def shared(deep_agreeing_path: Path) -> Iterator[LeadingTransformer]:
    threads = torch.get_num_threads()
    model = load_parallel(Job(deep_agreeing_path, 2, "cpu", "cpu", torch.float32))
    yield model
    model.close()
    torch.set_num_threads(threads)


def answers(model: Transformer, mode: str, trees: object = None) -> list[list[int]]:
    """Of four requests, greedy and seeded, that arrive one after the other; in mode "trees", with those drafts."""
    config = EngineConfig(max_model_len=512, num_blocks=40, block_size=16, max_num_seqs=4, max_batch_tokens=100)

    def drafter(request: Request) -> Drafter:
        return trees(request) if trees and int(request.id) % 2 else NoDrafter()

    engine = Engine(model, config, drafter if trees else None, exits=own_exits(model, (1, 2)))
    outputs: list[list[int]] = [[] for _ in range(4)]
    pending = [
        Request(
            id=str(i),
            prompt=[*PHRASE * (1 + 9 * i), 100 + i],
            params=SamplingParams(temperature=0.8 * (i // 2), seed=i, max_tokens=20, ignore_eos=True),
            speculation="off" if mode == "trees" else mode,
        )
        for i in range(4)
    ]
    while pending or engine.has_work:
        if pending:
            engine.add(pending.pop(0))
        for request, piece in engine.step():
            outputs[int(request.id)].extend(piece.tokens)
            assert piece.finish != "error"
    assert (engine.counters().spec["eagle"].num_accepted_tokens > 0) is (mode == "trees")
    return outputs


def test_a_pass_has_the_same_bits(alone: Transformer, shared: LeadingTransformer) -> None:
    assert shared.kv_bytes_per_token == alone.kv_bytes_per_token // 2
    assert answers(shared, "off") == answers(alone, "off")


@pytest.mark.parametrize("mode", ["suffix", "early_exit", "hispec"])
def test_drafts_change_no_token(alone: Transformer, shared: LeadingTransformer, mode: str) -> None:
    assert answers(shared, mode) == answers(alone, "off")


def test_trees_change_no_token(alone: Transformer, shared: LeadingTransformer, scripted_trees: type) -> None:
    """Accepted paths are moved in every process's pool."""
    expected = answers(alone, "off")

    def trees(request: Request) -> Drafter:
        return scripted_trees(expected[int(request.id)], 0.2, int(request.id), 320)

    assert answers(shared, "trees", trees) == expected


def test_parts_of_a_weight_are_the_weight() -> None:
    weight = torch.arange(24.0).view(12, 2)
    assert torch.equal(torch.cat([Part(rank, 3).rows(weight) for rank in range(3)]), weight)


def test_a_model_that_cannot_be_shared_is_refused(tiny_llama_path: Path) -> None:
    check_divides(read_config(tiny_llama_path), 2)
    with pytest.raises(ModelError, match="tensor_parallel: 4 processes cannot share a model whose num_key_value_heads"):
        check_divides(read_config(tiny_llama_path), 4)

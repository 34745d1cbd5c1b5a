"""Two processes that share every layer give the token ids of one, in every mode."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from verdraft.kernels.chooser import choose_kernels
from verdraft.model.config import read_config
from verdraft.model.eagle import EagleHead
from verdraft.model.errors import ModelError
from verdraft.model.exit_head import own_exits
from verdraft.model.load import load_model
from verdraft.model.parallel import Job, LeadingTransformer, load_parallel
from verdraft.model.part import Part, check_divides
from verdraft.model.transformer import Transformer
from verdraft.scheduler.config import DraftShape, EngineConfig
from verdraft.scheduler.engine import DrafterFactory, Engine
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Mode, Request
from verdraft.spec.draft import Drafter, NoDrafter
from verdraft.spec.spending import CostTable

CPU = torch.device("cpu")
PHRASE = [50, 60, 70, 80, 90]
FirstLayerEagle = Callable[[Path, Transformer], EagleHead]


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


def engine_for(
    model: Transformer, drafters: DrafterFactory | None = None, eagle: EagleHead | None = None, topk: int = 1
) -> Engine:
    config = EngineConfig(
        max_model_len=512,
        num_blocks=40,
        block_size=16,
        max_num_seqs=4,
        max_batch_tokens=100,
        eagle=DraftShape(depth=4, topk=topk, tokens=8),
    )
    return Engine(model, config, drafters, own_exits(model, (1, 2)), eagle)


def answers(engine: Engine, mode: Mode) -> list[list[int]]:
    """Of four requests, greedy and seeded, that arrive one after the other."""
    outputs: list[list[int]] = [[] for _ in range(4)]
    pending = [
        Request(
            id=str(i),
            prompt=[*PHRASE * (1 + 9 * i), 100 + i],
            params=SamplingParams(temperature=0.8 * (i // 2), seed=i, max_tokens=20, ignore_eos=True),
            speculation=mode,
        )
        for i in range(4)
    ]
    while pending or engine.has_work:
        if pending:
            engine.add(pending.pop(0))
        for request, piece in engine.step():
            outputs[int(request.id)].extend(piece.tokens)
            assert piece.finish != "error"
    return outputs


def accepted(engine: Engine, source: str) -> int:
    return engine.counters().spec[source].num_accepted_tokens


@pytest.fixture(scope="module")
def expected(alone: Transformer) -> list[list[int]]:
    """Of one process, without speculation."""
    return answers(engine_for(alone), "off")


def test_rounded_inputs_keep_their_bits_too(deep_agreeing_path: Path) -> None:
    """First in this file: a process leads one model at a time, and `shared` stays to the end."""
    kernels = choose_kernels("cpu", CPU, torch.float32, "int8", activations="int8")
    alone = load_model(deep_agreeing_path, kernels, torch.float32, CPU)
    shared = load_parallel(Job(deep_agreeing_path, 2, "cpu", "cpu", torch.float32, "int8", activations="int8"))
    try:
        assert all(layer.qkv.rounds for layer in shared.layers)
        assert answers(engine_for(shared), "suffix") == answers(engine_for(alone), "off")
        with pytest.raises(ModelError, match="tensor_parallel: this process already leads a model"):
            load_parallel(Job(deep_agreeing_path, 2, "cpu", "cpu", torch.float32))
        assert answers(engine_for(shared), "off") == answers(engine_for(alone), "off")
    finally:
        shared.close()


def test_a_pass_has_the_same_bits(alone: Transformer, shared: LeadingTransformer, expected: list[list[int]]) -> None:
    assert shared.kv_bytes_per_token == alone.kv_bytes_per_token // 2
    assert answers(engine_for(shared), "off") == expected


@pytest.mark.parametrize("mode", ["suffix", "early_exit", "hispec"])
def test_drafts_change_no_token(shared: LeadingTransformer, expected: list[list[int]], mode: Mode) -> None:
    engine = engine_for(shared)
    assert answers(engine, mode) == expected
    assert accepted(engine, "suffix" if mode == "suffix" else "early_exit") > 0


@pytest.mark.parametrize("topk", [1, 3], ids=["chains", "trees"])
def test_eagle_changes_no_token(
    shared: LeadingTransformer,
    expected: list[list[int]],
    topk: int,
    deep_agreeing_path: Path,
    first_layer_eagle: FirstLayerEagle,
) -> None:
    """The head drafts in the leader alone, from streams that all processes computed."""
    engine = engine_for(shared, eagle=first_layer_eagle(deep_agreeing_path, shared), topk=topk)
    assert answers(engine, "eagle") == expected
    assert accepted(engine, "eagle") > 0


def test_hybrid_changes_no_token(
    shared: LeadingTransformer,
    expected: list[list[int]],
    deep_agreeing_path: Path,
    first_layer_eagle: FirstLayerEagle,
) -> None:
    engine = engine_for(shared, eagle=first_layer_eagle(deep_agreeing_path, shared), topk=2)
    engine.drafting.costs = CostTable((1, 32), (1.0, 2.0))
    assert answers(engine, "hybrid") == expected
    assert sum(accepted(engine, source) for source in ("suffix", "early_exit", "eagle")) > 0


def test_scripted_trees_change_no_token(
    shared: LeadingTransformer, expected: list[list[int]], scripted_trees: type
) -> None:
    """Accepted paths are moved in every process's pool."""

    def drafter(request: Request) -> Drafter:
        number = int(request.id)
        return scripted_trees(expected[number], 0.2, number, 320) if number % 2 else NoDrafter()

    engine = engine_for(shared, drafter)
    assert answers(engine, "off") == expected
    assert accepted(engine, "eagle") > 0


def test_a_request_that_comes_upon_nan_leaves_nothing(shared: LeadingTransformer, expected: list[list[int]]) -> None:
    """In any process: the next ones get the blocks that it had."""
    token, engine = 7, engine_for(shared)
    with torch.inference_mode():
        before = shared.embedding[token].clone()
        shared.embedding[token] = torch.nan
    engine.add(Request(id="bad", prompt=[token] * 300, params=SamplingParams(max_tokens=4)))
    while engine.has_work:
        finishes = [piece.finish for _, piece in engine.step()]
    with torch.inference_mode():
        shared.embedding[token] = before
    assert finishes == ["error"]
    assert answers(engine, "off") == expected


def test_parts_of_a_weight_are_the_weight() -> None:
    weight = torch.arange(24.0).view(12, 2)
    assert torch.equal(torch.cat([Part(rank, 3).rows(weight) for rank in range(3)]), weight)


def test_a_model_that_cannot_be_shared_is_refused(tiny_llama_path: Path) -> None:
    check_divides(read_config(tiny_llama_path), 2)
    with pytest.raises(ModelError, match="tensor_parallel: 4 processes cannot share a model whose num_key_value_heads"):
        check_divides(read_config(tiny_llama_path), 4)

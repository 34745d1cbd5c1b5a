"""Recorded passes: filled up to a few sizes and replayed from the same tensors, they change no token.

A stand-in for CUDA graphs runs a pass again and leaves its result where the first one was, as a graph does.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from verdraft.kernels.base import Batch
from verdraft.kernels.chooser import choose_kernels
from verdraft.model.eagle import EagleHead
from verdraft.model.exit_head import Exits, own_exits
from verdraft.model.load import load_model
from verdraft.model.recordings import (
    TOKENS,
    RecordedTransformer,
    Size,
    eagle_with_recordings,
    size_of,
    with_recordings,
)
from verdraft.model.transformer import Transformer
from verdraft.scheduler.config import DraftShape, EngineConfig
from verdraft.scheduler.engine import NO_EXITS, Engine
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Request

CPU = torch.device("cpu")
PHRASE = [50, 60, 70, 80, 90]


class Rerunner:
    """Records `most` passes at most."""

    def __init__(self, most: int = 1000) -> None:
        self.most = most
        self.replays = 0

    @property
    def full(self) -> bool:
        return self.most <= 0

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.most -= 1
        out = work()

        def replay() -> Tensor:
            self.replays += 1
            return out.copy_(work())

        return replay


def load(path: Path) -> Transformer:
    return load_model(path, choose_kernels("cpu", CPU, torch.float32), torch.float32, CPU)


def answers(
    model: Transformer, mode: str, exits: Exits = NO_EXITS, eagle: EagleHead | None = None, topk: int = 1
) -> list[list[int]]:
    """Of six requests, greedy and seeded, that arrive one after the other."""
    shape = DraftShape(depth=4, topk=topk, tokens=8)
    config = EngineConfig(
        max_model_len=512, num_blocks=40, block_size=16, max_num_seqs=4, max_batch_tokens=300, eagle=shape
    )
    engine = Engine(model, config, exits=exits, eagle=eagle)
    outputs: list[list[int]] = [[] for _ in range(6)]
    pending = [
        Request(
            id=str(i),
            prompt=[*PHRASE * (1 + 9 * i), 100 + i],
            params=SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=20, ignore_eos=True),
            speculation=mode,
        )
        for i in range(6)
    ]
    while pending or engine.has_work:
        if pending:
            engine.add(pending.pop(0))
        for request, piece in engine.step():
            outputs[int(request.id)].extend(piece.tokens)
            assert piece.finish != "error"
    return outputs


@pytest.mark.parametrize("mode", ["off", "suffix", "hispec"])
@pytest.mark.parametrize("most", [1000, 3])
def test_recorded_passes_give_the_same_tokens(deep_agreeing_path: Path, mode: str, most: int) -> None:
    plain, recorder = load(deep_agreeing_path), Rerunner(most)
    model = with_recordings(plain, recorder)
    found = answers(model, mode, own_exits(model, (1, 2)))
    assert found == answers(plain, mode, own_exits(plain, (1, 2)))
    assert recorder.replays > (20 if most == 1000 else 0)
    assert len(model.recordings.by_size) <= most


@pytest.mark.parametrize("topk", [1, 3], ids=["chains", "trees"])
def test_recorded_eagle_steps_give_the_same_tokens(
    bigram_path: Path, first_layer_eagle: Callable[[Path, Transformer], EagleHead], topk: int
) -> None:
    plain, recorder = load(bigram_path), Rerunner()
    head = eagle_with_recordings(first_layer_eagle(bigram_path, plain), recorder)
    assert answers(plain, "eagle", eagle=head, topk=topk) == answers(plain, "off")
    assert recorder.replays > 20
    assert any(size.tree for size in head.recordings.by_size) is (topk > 1)


@torch.inference_mode()
def test_a_recorded_eagle_step_has_the_bits_of_a_plain_one(
    bigram_path: Path, first_layer_eagle: Callable[[Path, Transformer], EagleHead]
) -> None:
    """Steps of other sizes come in between, so that nothing of them may stay."""
    plain = first_layer_eagle(bigram_path, load(bigram_path))
    recorded, batch = eagle_with_recordings(plain, Rerunner()), tree_batch(16)
    one, other = plain.new_pool(3, 16), recorded.new_pool(3, 16)
    torch.manual_seed(0)
    for _ in range(3):
        features, tokens = torch.randn(4, 64), torch.randint(0, 320, (4,))
        assert torch.equal(
            recorded.forward(features, tokens, batch, other), plain.forward(features, tokens, batch, one)
        )
    assert list(recorded.recordings.by_size) == [Size(0, 1, 4, 2, 4, True)]


class Refuser(Rerunner):
    """Runs out of memory after three recordings, as a GPU would: in the middle of one."""

    attempts = 0

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.attempts += 1
        if self.attempts > 3:
            work()
            raise torch.OutOfMemoryError("no memory for a recording")
        return super().record(work)


def test_a_recording_that_fails_costs_no_request(deep_agreeing_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, recorder = load(deep_agreeing_path), Refuser()
    assert answers(with_recordings(plain, recorder), "hispec", own_exits(plain, (1, 2))) == answers(plain, "off")
    assert recorder.attempts == 4
    assert recorder.replays > 0
    assert [record.message for record in caplog.records if "no more passes are recorded" in record.message]


def tree_batch(size: int) -> Batch:
    return Batch(
        cu_q=torch.tensor([0, 3, 4], dtype=torch.int32),
        seq_lens=torch.tensor([20, 1], dtype=torch.int32),
        pages=torch.tensor([[0, 1, 0], [2, 0, 0]], dtype=torch.int32),
        slots=torch.tensor([size + 1, size + 2, size + 3, 2 * size]),
        positions=torch.tensor([17, 18, 18, 0]),
        max_q=3,
        max_k=20,
        parents=torch.tensor([-1, 0, 0, -1], dtype=torch.int32),
    )


def test_a_tree_is_filled_up_too(tiny_llama_path: Path) -> None:
    plain = load(tiny_llama_path)
    torch.manual_seed(0)
    batch, hidden = tree_batch(16), torch.randn(4, plain.config.hidden_size)
    expected = plain.forward(hidden, batch, plain.new_pool(3, 16), 0, 2)
    model = with_recordings(plain, Rerunner())
    pool = model.new_pool(3, 16)
    for _ in range(2):
        assert torch.equal(model.forward(hidden, batch, pool, 0, 2), expected)
    assert list(model.recordings.by_size) == [Size(0, 2, 4, 2, 4, True)]


def test_another_pool_and_long_passes_run_as_they_are(tiny_llama_path: Path) -> None:
    model = with_recordings(load(tiny_llama_path), Rerunner())
    model.new_pool(3, 16)
    model.forward(torch.randn(4, model.config.hidden_size), tree_batch(16), Transformer.new_pool(model, 3, 16), 0, 2)
    assert not model.recordings.by_size
    assert isinstance(model, RecordedTransformer)


@pytest.mark.parametrize(("num", "expected"), [(1, 1), (3, 4), (17, 24), (256, 256), (257, None)])
def test_a_size_holds_its_pass(num: int, expected: int | None) -> None:
    zeros = torch.zeros(num, dtype=torch.int64)
    pages = torch.zeros(3, 5, dtype=torch.int32)
    size = size_of(Batch(zeros, zeros, pages, zeros, zeros, 1, 1), 2, 7)
    assert size == (Size(2, 7, expected, 4, 8, False) if expected else None)
    assert tuple(sorted(TOKENS)) == TOKENS

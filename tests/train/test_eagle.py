"""EAGLE3 training: the net is the head that runs, learns, resumes, and is judged by what the head would do."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from verdraft.kernels.base import Kernels
from verdraft.kernels.chooser import choose_kernels
from verdraft.model.eagle import EagleHead, assemble_eagle
from verdraft.model.eagle_file import load_eagle
from verdraft.model.errors import ModelError
from verdraft.model.load import load_model
from verdraft.model.transformer import Transformer
from verdraft.scheduler.batches import ragged_batch
from verdraft.train import eagle_fit
from verdraft.train.collect import Collection
from verdraft.train.distil import Target
from verdraft.train.eagle import EagleJob, EagleTrainer
from verdraft.train.eagle_fit import EagleRecipe, fit, loss_of, unrolled, wanted_shares
from verdraft.train.eagle_judge import DEPTH, judge
from verdraft.train.eagle_net import EagleNet
from verdraft.train.eagle_rows import Rows, load_rows
from verdraft.train.eagle_start import solve
from verdraft.train.prompts import TrainingPrompt
from verdraft.train.shards import Shards

CPU = torch.device("cpu")
RECIPE = EagleRecipe(inner=32, unroll=3, epochs=3, batch=80)
LAYERS = (2, 3, 4)


@pytest.fixture(scope="module")
def path(tiny_model: Callable[..., Path]) -> Path:
    """Seven layers, the fewest that have three to read."""
    return tiny_model("Llama", num_hidden_layers=7)


@pytest.fixture(scope="module")
def model(path: Path) -> Transformer:
    return load_model(path, choose_kernels("cpu", CPU, torch.float32), torch.float32, CPU)


def trainer(model: Transformer, path: Path, out: Path, said: list[str] | None = None) -> EagleTrainer:
    job = EagleJob(out=out, recipe=RECIPE, vocabulary=64, tokens=150, max_tokens=24, shard_prompts=4, progress=False)
    return EagleTrainer(model, path, job, (said if said is not None else []).append)


@pytest.fixture(scope="module")
def shards(model: Transformer, path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Eight sequences of about 30 rows."""
    draw = np.random.default_rng(1)
    prompts = [TrainingPrompt("some", tuple(draw.integers(3, 320, 10).tolist()), False, True) for _ in range(8)]
    plan = Collection(layers=LAYERS, max_tokens=24, shard_prompts=4)
    folder = tmp_path_factory.mktemp("shards")
    return Shards.claim(folder, model, path, prompts, plan, progress=False).collect("train", prompts, None)


@pytest.fixture
def target(model: Transformer, path: Path, shards: list[Path], tmp_path: Path) -> Target:
    return trainer(model, path, tmp_path).target_of(shards)


@pytest.fixture
def rows(shards: list[Path], target: Target) -> Rows:
    return load_rows(shards, LAYERS, target)


def net_of(model: Transformer, path: Path, target: Target) -> EagleNet:
    torch.manual_seed(0)
    return EagleNet(trainer(model, path, path).config(), model.embedding.clone(), target.rows)


def head_of(net: EagleNet, target: Target, model: Transformer) -> EagleHead:
    tensors = {**net.state_dict(), "lm_head.weight": target.rows}
    return assemble_eagle(net.config, tensors, target.token_ids, model)


@torch.inference_mode()
def chain(head: EagleHead, rows: Rows, anchor: int, depth: int) -> list[torch.Tensor]:
    """What the head that runs returns behind row `anchor` of the first sequence, step by step along the text."""
    pool, table = head.new_pool(8, 16), np.arange(8)[None]

    def run(features: torch.Tensor, first: int) -> torch.Tensor:
        num = len(features)
        batch = ragged_batch(np.array([num]), np.array([first]), table, 16, CPU)
        return head.forward(features, rows.next[first : first + num], batch, pool)[-1:]

    hidden = [run(head.fuse(rows.aux[: anchor + 1].float()), 0)]
    for step in range(1, depth):
        hidden.append(run(hidden[-1], anchor + step))
    return hidden


def test_unrolled_steps_are_what_the_head_drafts(
    model: Transformer, path: Path, target: Target, rows: Rows, unrounded_kernels: Kernels
) -> None:
    """From the target's features up to an anchor, and behind it from the drafter's own."""
    net = net_of(model, path, target)
    with torch.no_grad():
        for weight in net.parameters():
            if weight.ndim == 1:
                weight.copy_(1 + 0.2 * torch.randn(weight.shape))
        steps = list(unrolled(net, rows, rows.anchors, 4, lambda chains, index: rows.room(chains.anchors) >= index))
    head = head_of(net, target, replace(model, kernels=unrounded_kernels))
    for anchor in (int(rows.anchors[0]), int(rows.anchors[5])):
        for chains, expected in zip(steps, chain(head, rows, anchor, 4), strict=True):
            hidden = chains.hidden[chains.anchors == anchor]
            torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=1e-4)


def test_anchors_are_where_two_own_tokens_follow(rows: Rows) -> None:
    owners = rows.owners(torch.arange(len(rows.next)))
    expected = [
        row
        for row in range(len(rows.next) - 1)
        if rows.own[row] and rows.own[row + 1] and owners[row] == owners[row + 1]
    ]
    assert rows.own_anchors.tolist() == expected
    assert rows.room(torch.tensor([0])).tolist() == [int(rows.lengths[0]) - 1]
    part = rows.part([2, 0])
    assert part.next.tolist() == [*rows.next[owners == 2].tolist(), *rows.next[owners == 0].tolist()]


def test_a_likely_token_outside_the_vocabulary_teaches_nothing(rows: Rows) -> None:
    known = rows.first >= 0
    assert 0 < int(known.sum()) < len(known)
    wanted = wanted_shares(rows, torch.arange(len(known)), 0.3)
    torch.testing.assert_close(wanted.sum(-1), known.float())
    assert (wanted[known, 0] >= 0.3).all()
    assert torch.equal(rows.likely[known, 0], rows.first[known])


def test_least_squares_and_then_steps_lower_the_loss(
    model: Transformer, path: Path, target: Target, rows: Rows, tmp_path: Path
) -> None:
    def loss(net: EagleNet) -> float:
        with torch.no_grad():
            return loss_of(net, rows, replace(RECIPE, decay=1.0), torch.Generator())[1]

    net = net_of(model, path, target)
    untrained = loss(net)
    solve(net, rows, RECIPE.ridge, 0)
    solved = loss(net)
    assert solved < 0.8 * untrained
    fit(net, rows, replace(RECIPE, epochs=8), tmp_path / "kept.pt", progress=False)
    assert loss(net) < 0.95 * solved


def test_an_interrupted_training_ends_with_the_same_weights(
    model: Transformer, path: Path, target: Target, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle_fit, "SAVE_EVERY", 2)
    whole, first, second, other = (net_of(model, path, target) for _ in range(4))
    fit(whole, rows, RECIPE, tmp_path / "whole.pt", progress=False)

    calls = itertools.count(1)

    def stop_at_the_fifth(*given: Any) -> tuple[torch.Tensor, float]:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return loss_of(*given)

    with monkeypatch.context() as patched:
        patched.setattr(eagle_fit, "loss_of", stop_at_the_fifth)
        with pytest.raises(KeyboardInterrupt):
            fit(first, rows, RECIPE, tmp_path / "cut.pt", progress=False)
    fit(second, rows, RECIPE, tmp_path / "cut.pt", progress=False)
    fit(other, rows, replace(RECIPE, seed=1), tmp_path / "cut.pt", progress=False)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
    assert not torch.equal(whole.fc.weight, other.fc.weight)


def test_the_judge_counts_what_the_head_would_have_accepted(
    model: Transformer, path: Path, target: Target, rows: Rows, tmp_path: Path
) -> None:
    net = net_of(model, path, target)
    fit(net, rows, replace(RECIPE, epochs=8), tmp_path / "kept.pt", progress=False)
    figures = judge(net, rows, ["even", "odd"] * 4)
    head, lengths = head_of(net, target, model), []
    for number in torch.nonzero(rows.greedy).squeeze(1).tolist():
        text = rows.part([number])
        for anchor in text.own_anchors[text.room(text.own_anchors) >= DEPTH].tolist():
            drafted = [int(head.logits(hidden).argmax()) for hidden in chain(head, text, anchor, DEPTH)]
            agrees = [mine == int(text.first[anchor + i]) for i, mine in enumerate(drafted, 1)]
            lengths.append(agrees.index(False) if False in agrees else DEPTH)
    assert figures["rows"] == len(lengths)
    assert figures["length"] == pytest.approx(np.mean(lengths), abs=0.15)  # 8 bits and bfloat16 change a little
    assert np.mean(lengths) > 0.5
    assert figures["acceptance"][0] == pytest.approx(np.mean(np.array(lengths) > 0), abs=0.1)
    assert set(figures["length_by_source"]) == {"even"}


def test_the_whole_run_writes_a_head_that_says_how_it_was_made(
    model: Transformer, path: Path, prompts: list[TrainingPrompt], tmp_path: Path
) -> None:
    said: list[str] = []
    trainer(model, path, tmp_path, said).run(prompts)
    head = load_eagle(tmp_path, model, path)
    assert head.config.aux_layers == LAYERS
    assert len(head.token_ids) == 64
    about = json.loads((tmp_path / "config.json").read_text())
    record = about["verdraft"]["training"]
    assert json.loads(said[-1]) == record["held_out"]
    assert record["held_out"]["rows"] > 0
    assert sum(record["prompts"].values()) <= 15
    assert record["recipe"]["unroll"] == 3


def test_a_model_with_too_few_layers_is_refused(
    deep: Transformer, deep_path: Path, prompts: list[TrainingPrompt], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="at least 7 layers, got 4"):
        trainer(deep, deep_path, tmp_path).run(prompts)

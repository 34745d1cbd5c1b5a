"""Collection, distillation and the whole run, on a small random model."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from verdraft.kernels.base import Kernels
from verdraft.kernels.torch_ref import TorchKernels
from verdraft.model.errors import ModelError
from verdraft.model.exit_file import load_exits
from verdraft.model.load import load_model
from verdraft.model.transformer import Transformer
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Request
from verdraft.train.adapter import Adapter
from verdraft.train.collect import Collection, collect_shard, load_shards, write_shard
from verdraft.train.distil import Recipe, Target, distil, frequent_tokens, judge, solved
from verdraft.train.exits import ExitJob, ExitTrainer
from verdraft.train.prompts import DataError, TrainingPrompt
from verdraft.train.shards import Shards
from verdraft.train.sweep import Candidates

PLAN = Collection(layers=(1, 2), max_tokens=12, shard_prompts=4)
RECIPE = Recipe(inner=32, epochs=6, batch=32)
ONE = Candidates((1, 2), (64,), (32,))


def job(out: Path, tokens: int = 60, candidates: Candidates = ONE, plan: Collection = PLAN) -> ExitJob:
    return ExitJob(out=out, candidates=candidates, collection=plan, recipe=RECIPE, tokens=tokens, progress=False)


def trainer(deep: Transformer, deep_path: Path, what: ExitJob, said: list[str] | None = None) -> ExitTrainer:
    return ExitTrainer(deep, deep_path, what, (said if said is not None else []).append)


def test_states_are_the_streams_that_made_the_tokens(
    deep: Transformer, prompts: list[TrainingPrompt], tmp_path: Path
) -> None:
    """The engine says the same at temperature 0, and the recorded final stream gives the recorded probabilities."""
    ids = [p.ids for p in prompts[:4]]
    write_shard(tmp_path / "a.safetensors", collect_shard(deep, ids, 0, PLAN))
    rows = load_shards([tmp_path / "a.safetensors"])
    for number in (0, 2):
        written = rows["next"][rows["own"] & (rows["sequence"] == number)].tolist()
        assert written == greedy_tokens(deep, ids[number], PLAN.max_tokens)
        assert rows["greedy"][rows["sequence"] == number].all()
    assert not rows["greedy"][rows["sequence"] == 1].any()
    logp = torch.nn.functional.linear(rows["final"].float(), head_of(deep)) - rows["lse"][:, None]
    torch.testing.assert_close(logp.exp().sum(-1), torch.ones(len(logp)), atol=2e-2, rtol=0)
    assert torch.equal(logp.argmax(-1)[rows["greedy"]].int(), rows["argmax"][rows["greedy"]])


def greedy_tokens(model: Transformer, prompt: Sequence[int], num: int) -> list[int]:
    eos = model.config.eos_token_ids
    engine = Engine(model, EngineConfig(max_model_len=64, num_blocks=8, speculation="off", eos_token_ids=eos))
    engine.add(Request(id="r", prompt=prompt, params=SamplingParams(max_tokens=num, temperature=0)))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for _, piece in engine.step() for token in piece.tokens]
    return tokens


def head_of(model: Transformer) -> torch.Tensor:
    with torch.inference_mode():
        rows = model.kernels.linear(torch.eye(model.config.hidden_size), model.head).T
    return rows.clone()


def test_an_interrupted_collection_ends_with_the_same_files(
    deep: Transformer, deep_path: Path, prompts: list[TrainingPrompt], tmp_path: Path
) -> None:
    shards = Shards.claim(tmp_path, deep, deep_path, prompts, PLAN, progress=False)
    first = load_shards(shards.collect("train", prompts, 100))
    files = sorted(tmp_path.glob("train-*.safetensors"))
    assert len(files) > 2
    kept = {file: file.read_bytes() for file in files}
    files[1].unlink()
    files[0].with_suffix(".partial").write_bytes(b"cut short")
    again = load_shards(shards.collect("train", prompts, 100))
    assert {file: file.read_bytes() for file in files} == kept
    assert torch.equal(first["next"], again["next"])


def test_distillation_lowers_both_losses_and_depends_on_the_seed_alone(
    deep: Transformer, deep_path: Path, prompts: list[TrainingPrompt], tmp_path: Path
) -> None:
    run = trainer(deep, deep_path, job(tmp_path))
    rows = load_shards(Shards.claim(tmp_path, deep, deep_path, prompts, PLAN, False).collect("train", prompts, None))
    target = run.target_of(rows, 64)
    after, same, other = (
        distil(rows, 2, target, recipe, progress=False) for recipe in (RECIPE, RECIPE, replace(RECIPE, seed=1))
    )
    heads = (Adapter(target.rows, 32, 1e-6, 0.0, 0), solved(rows, 2, target, RECIPE), after)
    raw, first, trained = (judge(head, rows, 2, target, target.token_ids).losses for head in heads)
    assert first.kl < 0.5 * raw.kl
    assert first.cross_entropy < raw.cross_entropy
    assert trained.kl + trained.cross_entropy < 0.7 * (first.kl + first.cross_entropy)  # the two pull apart here
    assert torch.equal(after.weights().wide, same.weights().wide)
    assert not torch.equal(after.weights().wide, other.weights().wide)


def test_the_vocabulary_is_what_the_model_says_most() -> None:
    rows = {
        "next": torch.tensor([5, 5, 7, 9], dtype=torch.int32),
        "argmax": torch.tensor([5, 7, 7, 1], dtype=torch.int32),
        "own": torch.tensor([True, True, True, False]),
    }
    assert frequent_tokens(rows, 12, 2).tolist() == [5, 7]
    assert frequent_tokens(rows, 12, 3).tolist() == [1, 5, 7]  # 9 was only read


def test_a_choice_is_kept_to_a_part_of_the_vocabulary(deep: Transformer, prompts: list[TrainingPrompt]) -> None:
    shard = collect_shard(deep, [p.ids for p in prompts[:4]], 0, PLAN)
    target = Target(np.arange(320), head_of(deep), 1e-6)
    adapter = distil(shard, 1, target, replace(RECIPE, epochs=1), progress=False)
    some = np.array([3, 50, 200])
    assert set(judge(adapter, shard, 1, target, some).chosen.tolist()) <= {3, 50, 200}


def test_the_whole_run_writes_heads_that_say_what_was_trained(
    deep: Transformer, deep_path: Path, prompts: list[TrainingPrompt], tmp_path: Path
) -> None:
    said: list[str] = []
    run = trainer(deep, deep_path, job(tmp_path), said)
    run.run(prompts)
    exits = load_exits(tmp_path, deep, deep_path)
    assert exits.bounds(4) == (0, 1, 2, 4)
    assert exits.draft.token_ids.tolist() == exits.check.token_ids.tolist()
    assert len(exits.draft.token_ids) == 64
    record = json.loads((tmp_path / "exits.json").read_text())["training"]
    assert set(record["held_out"]["agreement_by_source"]) == {"even"}
    assert sum(record["prompts"].values()) <= 15
    assert json.loads(said[-1]) == record["held_out"]
    rows = load_shards(sorted(tmp_path.glob("held-*.safetensors")))
    hidden = rows["layer.2"].float()
    with torch.inference_mode():
        chosen = exits.check.token_ids[exits.check.logits(hidden).argmax(-1).numpy()]
    agreement = float(np.mean((chosen == rows["argmax"].numpy())[rows["own"].numpy()]))
    assert agreement == pytest.approx(record["held_out"]["agreement"]["check"], abs=0.05)  # 8 bits change a little


def test_torch_kernels_compute_the_same_head(
    deep: Transformer, deep_path: Path, prompts: list[TrainingPrompt], tmp_path: Path, unrounded_kernels: Kernels
) -> None:
    trainer(deep, deep_path, job(tmp_path)).run(prompts)
    unrounded = replace(deep, kernels=unrounded_kernels)
    other = load_model(deep_path, TorchKernels(), torch.float32, torch.device("cpu"))
    hidden = torch.randn(3, 64)
    with torch.inference_mode():
        ours, theirs = (load_exits(tmp_path, m, deep_path).draft.logits(hidden) for m in (unrounded, other))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_several_candidates_are_compared_and_the_best_is_trained(
    deep: Transformer, deep_path: Path, prompts: list[TrainingPrompt], tmp_path: Path
) -> None:
    said: list[str] = []
    plan = replace(PLAN, layers=(1, 2, 3))
    candidates = Candidates((1, 2, 3), (32, 64), (16, 32))
    trainer(deep, deep_path, job(tmp_path, candidates=candidates, plan=plan), said).run(prompts)
    lines = said[0].splitlines()
    assert len(lines) == 1 + 3 * 2 * 2 + 1
    about = json.loads((tmp_path / "exits.json").read_text())
    draft, check = about["draft"], about["check"]
    assert lines[1].split()[:4] == [
        str(v) for v in (draft["layer"], check["layer"], draft["vocabulary"], draft["inner"])
    ]
    assert lines[-1].startswith(f"recommended: layers {draft['layer']},{check['layer']}, ")


def test_shards_of_something_else_are_not_mixed_in(
    deep: Transformer, deep_path: Path, prompts: list[TrainingPrompt], tmp_path: Path
) -> None:
    trainer(deep, deep_path, job(tmp_path)).run(prompts)
    with pytest.raises(DataError, match=r"collection\.json: shards of another model, other data or other settings"):
        trainer(deep, deep_path, job(tmp_path, plan=replace(PLAN, seed=1))).run(prompts)


def test_shards_with_more_layers_serve_whoever_needs_fewer(
    deep: Transformer, deep_path: Path, prompts: list[TrainingPrompt], tmp_path: Path
) -> None:
    narrow, wide = replace(PLAN, layers=(2,)), replace(PLAN, layers=(1, 2, 3))
    for plan, kept in ((wide, (1, 2, 3)), (narrow, (1, 2, 3))):
        shards = Shards.claim(tmp_path, deep, deep_path, prompts, plan, progress=False)
        assert shards.plan.layers == kept
        shards.collect("train", prompts, 30)
    Shards.claim(tmp_path / "narrow", deep, deep_path, prompts, narrow, progress=False)
    with pytest.raises(DataError, match="other settings"):
        Shards.claim(tmp_path / "narrow", deep, deep_path, prompts, wide, progress=False)


def test_data_without_a_prompt_to_validate_on_is_refused(
    deep: Transformer, deep_path: Path, prompts: list[TrainingPrompt], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="to validate on"):
        trainer(deep, deep_path, job(tmp_path)).run([p for p in prompts if not p.held_out])


def test_layers_outside_the_model_are_refused(
    deep: Transformer, deep_path: Path, prompts: list[TrainingPrompt], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="from 1 to 3, got 2,4"):
        trainer(deep, deep_path, job(tmp_path, candidates=Candidates((2, 4), (64,), (32,)))).run(prompts)

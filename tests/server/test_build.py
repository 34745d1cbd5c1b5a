"""From settings to an engine on a tiny model: where its early exits come from, and which modes that gives."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verdraft.kernels.base import KernelUnavailable
from verdraft.model.eagle import EagleConfig
from verdraft.model.eagle_file import save_eagle
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.outputs import SourceStats, SpecStats, Summary, Timing
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Request
from verdraft.server.build import build_engine, cpu_limit, free_memory
from verdraft.server.report import Report
from verdraft.server.settings import Settings, SettingsError, parse_flags
from verdraft.spec.eagle_costs import EagleCosts
from verdraft.spec.exit_costs import ExitCosts
from verdraft.spec.spending import FREE


def build(path: Path, **settings: object) -> Engine:
    return build_engine(Settings(kv_blocks=32, threads=1, device="cpu", **settings), path)


def generate(engine: Engine, **fields: object) -> tuple[list[int], Summary]:
    """The tokens and the last words of one greedy request."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    engine.add(Request(id="a", prompt=[5, 6, 7], params=params, **fields))
    pieces = [piece for _ in range(100) if engine.has_work for _, piece in engine.step()]
    assert pieces[-1].summary is not None
    return [token for piece in pieces for token in piece.tokens], pieces[-1].summary


def test_two_layers_give_two_more_modes(deep_agreeing_path: Path) -> None:
    """What LayerSkip checkpoints are made for: the model's own norm and head at early layers (PAPERS 2.7)."""
    engine = build(deep_agreeing_path, exits="1,2", speculation="hispec")
    assert engine.modes == ("auto", "off", "suffix", "early_exit", "hispec", "hybrid")
    plain, _ = generate(engine, speculation="off")
    for mode in ("auto", "early_exit", "hispec", "hybrid"):
        engine.drafting.costs, engine.drafting.exits.costs = FREE, ExitCosts()  # whatever these passes cost, draft
        tokens, summary = generate(engine, speculation=mode)
        assert tokens == plain
        assert summary.spec.sources["early_exit"].num_accepted_tokens > 0


@pytest.mark.parametrize("exits", ["auto", "none"])
def test_a_model_without_exits_has_no_such_modes(deep_llama_path: Path, exits: str) -> None:
    assert build(deep_llama_path, exits=exits).modes == ("auto", "off", "suffix", "hybrid")
    with pytest.raises(SettingsError, match="--speculation: hispec needs early exits"):
        build(deep_llama_path, exits=exits, speculation="hispec")


def test_rounded_inputs_reach_every_product_and_drafts_change_no_token(deep_agreeing_path: Path) -> None:
    engine = build(deep_agreeing_path, exits="1,2", quantization="int8", activations="int8")
    layers = engine._runner.model.layers
    assert all(part.rounds for layer in layers for part in (layer.qkv, layer.output, layer.up, layer.down))
    assert engine._runner.model.head.rounds
    plain, _ = generate(engine, speculation="off")
    for mode in ("suffix", "early_exit"):
        assert generate(engine, speculation=mode)[0] == plain


def test_rounded_inputs_need_blocks(tiny_llama_path: Path) -> None:
    with pytest.raises(KernelUnavailable, match=r"activations: int8 .* quantization: auto "):
        build(tiny_llama_path, activations="int8")


def test_an_eagle_head_gives_one_more_mode(
    deep_llama_path: Path, tmp_path: Path, tiny_eagle: EagleConfig, eagle_tensors: Any
) -> None:
    config = replace(tiny_eagle, aux_layers=(1, 2, 3))
    tensors = eagle_tensors(config, 320)
    del tensors["lm_head.weight"]
    save_eagle(tmp_path, deep_llama_path, config, tensors, np.arange(320), 320, {})
    engine = build(deep_llama_path, eagle=str(tmp_path), speculation="eagle", eagle_draft="4,2,5")
    assert engine.modes == ("auto", "off", "suffix", "eagle", "hybrid")
    assert engine.drafting.eagle is not None
    assert all(seconds > 0 for _, seconds in engine.drafting.eagle.costs.extend.points())
    plain, _ = generate(engine, speculation="off")
    engine.drafting.costs = FREE  # whatever this tiny model's passes cost, draft
    engine.drafting.eagle.costs = EagleCosts()
    tokens, summary = generate(engine)
    assert tokens == plain
    stats = summary.spec.sources["eagle"]
    assert stats.num_draft_tokens == pytest.approx(5 * stats.num_drafts, rel=0.1)


def test_a_model_without_a_head_has_no_such_mode(deep_llama_path: Path) -> None:
    with pytest.raises(SettingsError, match="--speculation: eagle needs an EAGLE3 head"):
        build(deep_llama_path, speculation="eagle")
    with pytest.raises(SettingsError, match=r"--eagle: .*config\.json"):
        build(deep_llama_path, eagle="nowhere")


@pytest.mark.parametrize("draft", ["0", "4,2", "4,2,5,1", "100", "4,0,5", "wide"])
def test_shapes_of_drafts_that_cannot_be(draft: str) -> None:
    with pytest.raises(SettingsError, match="--eagle-draft"):
        parse_flags(["--eagle-draft", draft])


def test_what_only_a_gpu_can_do_is_refused(tiny_llama_path: Path) -> None:
    with pytest.raises(SettingsError, match="--cuda-graphs: the cpu kernels on cpu cannot be recorded"):
        build(tiny_llama_path, cuda_graphs=True)
    with pytest.raises(KernelUnavailable, match="triton cannot run float32 on cpu: needs an NVIDIA GPU"):
        build(tiny_llama_path, kernels="triton")


@pytest.mark.parametrize(("asked", "expected"), [(None, 16), (32, 32)])
def test_blocks_are_as_the_kernels_like_them_unless_told(tiny_llama_path: Path, asked: int, expected: int) -> None:
    assert build(tiny_llama_path, block_size=asked, deterministic=True).config.block_size == expected


def test_a_pool_that_does_not_fit_is_refused(tiny_llama_path: Path) -> None:
    with pytest.raises(SettingsError, match="--kv-blocks: the free memory holds at most"):
        build_engine(Settings(kv_blocks=10**11, threads=1, device="cpu"), tiny_llama_path)


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000\n", None), ("150000 100000\n", 2), ("50000 100000\n", 1), ("", None)]
)
def test_a_container_may_have_less_than_its_cores(tmp_path: Path, text: str, cores: int | None) -> None:
    assert cpu_limit(tmp_path) is None
    (tmp_path / "cpu.max").write_text(text)
    assert cpu_limit(tmp_path) == cores


def test_a_container_may_have_less_than_the_free_memory(tmp_path: Path) -> None:
    """A pool of a tenth of the whole machine's memory, taken at start, would have it killed."""
    free = free_memory(tmp_path)
    assert free > 1 << 20
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 100000\ninactive_file 500000\n")
    assert free_memory(tmp_path) > 1 << 20
    (tmp_path / "memory.max").write_text("1000000\n")
    assert free_memory(tmp_path) == 900000
    (tmp_path / "memory.current").write_text("2000000\n")
    assert free_memory(tmp_path) == 0


@pytest.mark.parametrize("exits", ["2,1", "0,2", "1,4", "nowhere"])
def test_exits_that_cannot_be(deep_llama_path: Path, exits: str) -> None:
    with pytest.raises(SettingsError, match=r"--exits: .*exit"):
        build(deep_llama_path, exits=exits)


def test_the_report_says_when_exits_were_given_up() -> None:
    report = Report([3], 2, "hispec", with_prediction=False, with_reasoning=False)
    for index, given_up in enumerate((False, True)):
        assert report.speculation()["exits_given_up"] is False
        report.add(index, Summary(0, 5, SpecStats(given_up=given_up), Timing(0.0)), 0)
    assert report.speculation()["exits_given_up"] is True


def test_the_report_tells_margins_where_they_are_known() -> None:
    """In a form that JSON has."""
    report = Report([3], 2, "off", with_prediction=False, with_reasoning=False)
    for seen, told in (((), None), ((math.inf,), (0, None)), ((7.0, 0.5, 2.0), (2, 0.5)), ((1.0,), (3, 0.5))):
        stats = SpecStats()
        stats.margins.count(seen)
        report.add(0, Summary(0, len(seen), stats, Timing(0.0)), 0)
        found = report.speculation()
        assert ((found["near_ties"], found["least_margin"]) if "near_ties" in found else None) == told


def test_the_report_counts_cycles_and_accepted_tokens_by_place() -> None:
    report = Report([3], 2, "hybrid", with_prediction=False, with_reasoning=False)
    for accepted in (1, 3):
        stats = SpecStats(num_steps=1, num_target_passes=4)
        stats.sources["suffix"] = SourceStats()
        stats.sources["suffix"].count(drafted=4, accepted=accepted)
        report.add(0, Summary(0, 10, stats, Timing(0.0)), 0)
    found = report.speculation()
    assert (found["num_target_passes"], found["cycles_per_1000_tokens"]) == (8, 400.0)
    assert found["sources"]["suffix"]["num_accepted_per_position"] == [2, 1, 1]

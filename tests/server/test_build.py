"""From settings to an engine on a tiny model: where its early exits come from, and which modes that gives."""

from pathlib import Path

import pytest

from verdraft.model.errors import ModelError
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.outputs import SpecStats, Summary, Timing
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Request
from verdraft.server.build import build_engine
from verdraft.server.report import Report
from verdraft.server.settings import Settings, SettingsError
from verdraft.spec.exit_costs import ExitCosts


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
    assert engine.modes == ("auto", "off", "suffix", "early_exit", "hispec")
    plain, _ = generate(engine, speculation="off")
    for mode in ("auto", "early_exit", "hispec"):
        engine.drafting.exits.costs = ExitCosts()  # whatever this tiny model's passes cost, draft
        tokens, summary = generate(engine, speculation=mode)
        assert tokens == plain
        assert summary.spec.sources["early_exit"].num_accepted_tokens > 0


@pytest.mark.parametrize("exits", ["auto", "none"])
def test_a_model_without_exits_has_no_such_modes(deep_llama_path: Path, exits: str) -> None:
    assert build(deep_llama_path, exits=exits).modes == ("auto", "off", "suffix")
    with pytest.raises(SettingsError, match="--speculation: hispec needs early exits"):
        build(deep_llama_path, exits=exits, speculation="hispec")


@pytest.mark.parametrize("exits", ["2,1", "0,2", "1,4", "nowhere"])
def test_exits_that_cannot_be(deep_llama_path: Path, exits: str) -> None:
    with pytest.raises(ModelError, match="exit"):
        build(deep_llama_path, exits=exits)


def test_the_report_says_when_exits_were_given_up() -> None:
    report = Report([3], 2, "hispec", with_prediction=False, with_reasoning=False)
    for index, given_up in enumerate((False, True)):
        assert report.speculation()["exits_given_up"] is False
        report.add(index, Summary(0, 5, SpecStats(given_up=given_up), Timing(0.0)), 0)
    assert report.speculation()["exits_given_up"] is True

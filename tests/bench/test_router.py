"""Routers on replayed answers, and the table of the command."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from verdraft.bench.online import learning_gain
from verdraft.bench.router import main
from verdraft.bench.routers import (
    Cycle,
    Machine,
    Route,
    hvd,
    model_only,
    oracle,
    payoff,
    score_threshold,
    suffix_only,
    walk,
)
from verdraft.spec.features import FEATURES, NO_CLASSES
from verdraft.spec.predictor import PayoffPredictor, new_predictor
from verdraft.spec.replay import RecordedAnswer, States, joined, replay
from verdraft.spec.spending import CostTable

PASSES = CostTable((1, 101), (1.0, 11.0))  # a row more costs a tenth
NEVER = Machine(PASSES, 0.1, (0.0, 0.0))
ALWAYS = Machine(PASSES, 0.1, (1.0, 1.0))
PHRASE = tuple(range(10, 40))


def states() -> States:
    copied = RecordedAnswer("edit", "a", (1, *PHRASE, 2), (9, *PHRASE, 5))
    return replay([[copied]], NO_CLASSES)


def saying(mean: float, hazard: float) -> PayoffPredictor:
    """The same of every draft."""
    fresh = new_predictor(np.random.default_rng(0), hidden=4)
    last = fresh.layers[2]
    bias = np.full_like(last.bias, np.log(hazard / (1 - hazard)))
    bias[0] = mean / 8
    return replace(fresh, layers=(*fresh.layers[:2], last._replace(weight=0 * last.weight, bias=bias)))


def cycle(drafted: int, right: int = 0, model_right: int = 0, score: float = 0.0) -> Cycle:
    features = np.zeros((1, len(FEATURES)), np.float32)
    features[0, 0] = score
    return Cycle(drafted, features, right, model_right)


def test_without_drafts_every_token_is_a_cycle() -> None:
    done = walk(states(), NEVER, lambda cycle: Route(), [0])
    assert (done.cycles, done.tokens, done.seconds) == (31, 31, 31.0)
    assert done.cycles_per_1000 == 1000


def test_a_walk_goes_as_far_as_what_is_right() -> None:
    found = states()
    done = walk(found, NEVER, suffix_only, [0])
    position, cycles, drafted = 1, 0, 0
    while position < 32:
        here = np.flatnonzero(found.position == position)
        drafted += int(found.drafted[here].sum())
        position += 1 + int(found.accepted[here].sum())
        cycles += 1
    assert (done.cycles, done.tokens, done.drafted) == (cycles, 31, drafted)
    assert cycles < 12
    assert done.seconds == pytest.approx(cycles + 0.1 * drafted)


def test_the_model_drafter_keeps_to_its_chances() -> None:
    assert walk(states(), ALWAYS, model_only(ALWAYS), [0]).cycles == 11
    assert walk(states(), NEVER, model_only(NEVER), [0]).cycles == 31
    often = Machine(PASSES, 0.1, (0.5,))
    answer = RecordedAnswer("x", "a", (1,), tuple(range(10, 2010)))
    tokens = walk(replay([[answer]], NO_CLASSES), often, model_only(often), [0])
    assert tokens.tokens / tokens.cycles == pytest.approx(1.5, abs=0.05)


def test_thresholds_choose_the_source() -> None:
    assert score_threshold(ALWAYS, 6.0)(cycle(5, score=6.5)) == Route(suffix=5)
    assert score_threshold(ALWAYS, 6.0)(cycle(5, score=5.5)) == Route(model=2)
    assert hvd(ALWAYS, saying(6.5, 0.5), 6.0)(cycle(5)) == Route(suffix=5)
    assert hvd(ALWAYS, saying(5.5, 0.5), 6.0)(cycle(5)) == Route(model=2)
    assert hvd(ALWAYS, saying(6.5, 0.5), 6.0)(cycle(0)) == Route(model=2)


def test_payoff_trims_chooses_and_declines() -> None:
    assert payoff(NEVER, saying(0.0, 0.99))(cycle(9)) == Route(suffix=9)
    assert 0 < payoff(NEVER, saying(0.0, 0.6))(cycle(9)).suffix < 9
    assert payoff(NEVER, saying(0.0, 0.05))(cycle(9)) == Route()
    assert payoff(ALWAYS, saying(0.0, 0.05))(cycle(9)) == Route(model=2)
    loaded = replace(NEVER, streams=8)
    assert payoff(loaded, saying(0.0, 0.6))(cycle(9)).suffix < payoff(NEVER, saying(0.0, 0.6))(cycle(9)).suffix


def test_the_oracle_verifies_what_is_right_and_no_more() -> None:
    assert oracle(ALWAYS)(cycle(9, right=4, model_right=2)) == Route(suffix=4)
    assert oracle(ALWAYS)(cycle(9, right=0, model_right=2)) == Route(model=2)
    assert oracle(NEVER)(cycle(9)) == Route()
    best = walk(states(), ALWAYS, oracle(ALWAYS), [0])
    assert best.speed >= walk(states(), ALWAYS, suffix_only, [0]).speed


def test_the_command_prints_every_router_by_workload(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny_model("Llama", num_hidden_layers=2)
    Tokenizer(models.WordLevel({str(i): i for i in range(60)}, unk_token="0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    ids = [{"workload": w, "prompt": [1, *PHRASE], "output": [9, *PHRASE, 5]} for w in ("edit", "chat")]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ids))
    saying(7.0, 0.9).save(tmp_path / "p")
    flags = ["--data", tmp_path / "data", "--model", folder, "--predictor", tmp_path / "p", "--all"]
    head = {"verdraft": {"training": {"held_out": {"acceptance": [0.5, 0.5]}}}}
    (tmp_path / "config.json").write_text(json.dumps(head))
    flags += ["--head", tmp_path, "--costs", "1:10,11:20"]
    monkeypatch.setattr(sys, "argv", ["router", *map(str, flags)])
    main()
    said = capsys.readouterr().out
    assert "us to judge 16 drafts" in said
    assert "passes: 1: 10.0 ms, 11: 20.0 ms" in said
    assert "1.00 ms a token; its first 1, 2, .. are right with 0.50, 0.25" in said
    rows = [line.split() for line in said.split("cycles per 1,000 tokens\n")[1].split("\n")[:4]]
    assert rows[0] == ["none", "suffix", "model", "score", "HVD", "payoff", "oracle"]
    assert [row[0] for row in rows[1:]] == ["chat", "edit", "all"]
    assert rows[3][1] == "1000"
    assert int(rows[3][2]) < 500
    gains = [line.split()[:3] for line in said.split("learning online\n")[1].splitlines()]
    assert [gain[0] for gain in gains] == ["chat", "edit"]
    assert all(gain[1] == gain[2] for gain in gains)  # too few drafts to learn from


def test_a_predictor_that_learns_meets_every_draft_before_it_learns_from_it() -> None:
    found = states()
    many = joined([found] * 300)
    wrong = saying(0.0, 0.1)
    gain = learning_gain(many, wrong, range(300))
    assert gain.num_won > 0
    assert gain.round_seconds > 0
    assert gain.learning < 0.97 * gain.fixed
    first = learning_gain(many, wrong, range(8))
    assert first.learning == first.fixed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--costs", "1;2"], "--costs: expected rows:milliseconds, as 1:7.8,2:9.0; got '1;2'"),
        (["--acceptance", "0.5,2"], "--acceptance: expected numbers from 0 to 1 with commas, got '0.5,2'"),
        (["--head", "/nowhere"], "--head: '/nowhere' holds no head with recorded acceptance"),
    ],
)
def test_mistakes_name_the_flag(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["router", "--data", "/nowhere", *flags])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err

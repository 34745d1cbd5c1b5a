"""The predictor inside the engine: drafts are judged whoever is verified, tokens stay the law's, and what is learnt
lasts."""

import logging
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from verdraft.scheduler.learning import EVERY, BackgroundLearner, last_predictor
from verdraft.spec.features import FEATURES
from verdraft.spec.hindsight import LabelledState
from verdraft.spec.learning import OnlineLearner
from verdraft.spec.predictor import PayoffPredictor, load_predictor, new_predictor
from verdraft.spec.spending import CostTable, Reading

PROMPT = list(range(5, 25))
START = new_predictor(np.random.default_rng(0), hidden=16)


def again_and_again(engine, drain, make_request, num=6, **fields):
    """The answers to one prompt, `num` times, each after the other, so that the shared store knows them."""
    tokens = []
    for i in range(num):
        engine.add(make_request(f"r{i}", PROMPT, max_tokens=40, ignore_eos=True, **fields))
        tokens.append(drain(engine)[f"r{i}"].tokens)
    return tokens


def test_tokens_are_equal_whatever_is_predicted_and_learnt(make_engine, drain, make_request):
    fields = {"temperature": 1.0, "seed": 3}
    plain = again_and_again(make_engine(num_blocks=256), drain, make_request, speculation="off", **fields)
    engine = make_engine(num_blocks=256)
    estimates = engine.drafting.estimates
    learner = OnlineLearner(START, lambda predictor: None, rate=0.01)

    def teach(state: LabelledState) -> None:
        for _ in range(100):
            learner.add(state)
        learner.improve()
        estimates.use(learner._challenger.predictor())  # whatever it says by now

    estimates.use(START)
    estimates.teach = teach
    assert again_and_again(engine, drain, make_request, **fields) == plain
    assert estimates.predictor is not START
    assert engine.counters().spec["suffix"].num_accepted_tokens > 0


def test_drafts_are_judged_verified_or_not(make_engine, drain, make_request):
    """Where a further row costs more than a pass, no draft is verified, and all are labelled nevertheless."""
    found: list[LabelledState] = []
    engine = make_engine(num_blocks=256)
    engine.drafting.costs = CostTable((1, 2), (1.0, 9.0))
    engine.drafting.estimates.use(START)
    engine.drafting.estimates.teach = found.append
    again_and_again(engine, drain, make_request)
    counters = engine.counters()
    assert counters.spec["suffix"].num_draft_tokens == 0
    assert counters.predictor.num_states == len(found) > 20
    assert counters.predictor.accepted_tokens == sum(state.accepted for state in found)
    assert counters.predictor.predicted_tokens == pytest.approx(sum(state.predicted for state in found))
    assert counters.predictor.high_came == sum(state.accepted >= 6 for state in found) > 0
    assert max(state.accepted for state in found) == max(state.drafted for state in found)


def test_drafts_grow_where_reading_the_context_makes_passes_long(make_engine, drain, make_request):
    """Rows too dear to verify a draft are not, beside a pass that takes long anyway."""
    engine = make_engine(num_blocks=256)
    engine.drafting.costs = CostTable((1, 2), (1.0, 9.0))
    without = again_and_again(engine, drain, make_request)
    assert engine.counters().spec["suffix"].num_draft_tokens == 0
    engine.drafting.reading = Reading(sequence=10.0)
    assert again_and_again(engine, drain, make_request) == without
    assert engine.counters().spec["suffix"].num_accepted_tokens > 0


def right(rng: np.random.Generator) -> LabelledState:
    return LabelledState(rng.normal(size=len(FEATURES)).astype(np.float32), 8, 8, 0.0)


def taught(file: Path | None) -> tuple[BackgroundLearner, list[PayoffPredictor]]:
    """A learner in its thread that has published something."""
    published: list[PayoffPredictor] = []
    background = BackgroundLearner(OnlineLearner(START, published.append, rate=0.01), file)
    background.start()
    rng, end = np.random.default_rng(1), time.monotonic() + 60
    while not published and time.monotonic() < end:
        for _ in range(EVERY):
            background.add(right(rng))
        time.sleep(0.001)
    return background, published


def test_a_thread_learns_and_its_winner_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "predictor.safetensors"
    background, published = taught(file)
    assert any(thread.name == "verdraft-learner" for thread in threading.enumerate())
    background.close()
    assert not any(thread.name == "verdraft-learner" for thread in threading.enumerate())
    kept = last_predictor(file, START)
    rows = np.zeros((1, len(FEATURES)), np.float32)
    assert np.allclose(kept.predict(rows).survival, published[-1].predict(rows).survival, atol=5e-3)
    assert kept.record["online"]["learned_from"] >= 256


def test_without_a_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    background, published = taught(None)
    background.close()
    assert published
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_no_disaster(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    background, _ = taught(tmp_path / "file" / "predictor.safetensors")
    background.close()
    assert "cannot be kept" in caplog.text


def test_a_damaged_file_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "predictor.safetensors"
    assert last_predictor(file, START) is START
    assert not caplog.records
    file.write_bytes(b"half of")
    assert last_predictor(file, START) is START
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    START.save(file)
    assert np.array_equal(last_predictor(file, START).layers[0].bias, load_predictor(file).layers[0].bias)

"""Learning while serving: right slopes, fair trials, the same result every time."""

from dataclasses import replace

import numpy as np

from verdraft.spec.features import FEATURES
from verdraft.spec.hindsight import LabelledState
from verdraft.spec.learning import Buffer, Labelled, OnlineLearner, _Challenger, losses
from verdraft.spec.predictor import LENGTHS, Layer, PayoffPredictor, new_predictor

START, QUICK = new_predictor(np.random.default_rng(0), hidden=32), 3e-3


def law(rng: np.random.Generator, good: float, bad: float = 0.3) -> LabelledState:
    """A draft of 8 tokens, each right with probability `good` where the score is 1, with `bad` where it is 0."""
    features = np.zeros(len(FEATURES), np.float32)
    features[0] = rng.random() < 0.5
    right = rng.random(8) < (good if features[0] else bad)
    return LabelledState(features, 8, 8 if right.all() else int(right.argmin()), 0.0)


def some(num: int, seed: int = 1) -> Labelled:
    rng = np.random.default_rng(seed)
    states = [law(rng, 0.9) for _ in range(num)]
    columns = zip(*((s.features, s.drafted, s.accepted) for s in states), strict=True)
    features, drafted, accepted = (np.array(column) for column in columns)
    return Labelled(features, drafted.astype(np.int32), accepted.astype(np.int32))


def learned(good: float, rounds: int, start: PayoffPredictor = START, seed: int = 0) -> OnlineLearner:
    learner = OnlineLearner(start, lambda predictor: None, rate=QUICK, seed=seed)
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        for _ in range(64):
            learner.add(law(rng, good))
        learner.improve()
    return learner


def test_slopes_are_those_of_the_loss() -> None:
    states = some(20)
    rng, step = np.random.default_rng(2), 1e-3
    # Away from kinks: of ReLU at 0, and of the mean, which is cut there while the slope goes on.
    start = moved(moved(START, 1, rng.normal(size=32)), 3, rng.normal(size=32))
    start = moved(start, 5, 4.0 * (np.arange(1 + LENGTHS) == 0))
    slopes = _Challenger(start, 0.0)._slopes(states)
    for number, slope in enumerate(slopes):
        direction = rng.normal(size=slope.shape)
        sides = [float(losses(moved(start, number, sign * step * direction), states).mean()) for sign in (1, -1)]
        measured = (sides[0] - sides[1]) / (2 * step)
        assert np.isclose(measured, float((slope * direction).sum()), rtol=0.05, atol=1e-2)


def moved(start: PayoffPredictor, number: int, by: np.ndarray) -> PayoffPredictor:
    arrays = [array for layer in start.layers for array in layer]
    arrays[number] = (arrays[number] + by).astype(np.float32)
    w0, b0, w1, b1, w2, b2 = arrays
    return replace(start, layers=(Layer(w0, b0), Layer(w1, b1), Layer(w2, b2)))


def test_a_state_judges_before_it_teaches_and_the_better_one_is_published() -> None:
    published: list[PayoffPredictor] = []
    learner = OnlineLearner(START, published.append, rate=QUICK)
    rng = np.random.default_rng(0)
    for _ in range(40):
        for _ in range(64):
            learner.add(law(rng, 0.95))
        learner.improve()
    assert published
    assert learner.champion is published[-1]
    assert learner.num_won == len(published)
    fresh = some(500, seed=9)
    assert losses(learner.champion, fresh).mean() < 0.8 * losses(START, fresh).mean()
    assert learner.champion.record["online"]["learned_from"] > 0


def test_the_same_states_teach_the_same() -> None:
    one, same, other = (learned(0.9, 20, seed=seed).champion for seed in (0, 0, 1))
    assert np.array_equal(one.layers[1].weight, same.layers[1].weight)
    assert not np.array_equal(one.layers[1].weight, other.layers[1].weight)


def test_what_learns_nothing_useful_is_never_published() -> None:
    good = learned(0.9, 150).champion
    learner = OnlineLearner(good, lambda predictor: None, rate=QUICK)
    rng = np.random.default_rng(5)
    for _ in range(10):
        for _ in range(64):
            learner.add(law(rng, 0.9))
        learner.improve()
    fresh = some(2000, seed=9)
    assert losses(learner.champion, fresh).mean() < 1.05 * losses(good, fresh).mean()


def test_a_change_of_traffic_is_followed() -> None:
    before = learned(0.95, 60)
    rng, fresh = np.random.default_rng(3), [law(np.random.default_rng(i), 0.3, bad=0.95) for i in range(300)]
    after = OnlineLearner(before.champion, lambda predictor: None, capacity=2048, rate=QUICK)
    for _ in range(60):
        for _ in range(64):
            after.add(law(rng, 0.3, bad=0.95))
        after.improve()
    rows = Labelled(
        np.stack([s.features for s in fresh]),
        np.array([s.drafted for s in fresh], np.int32),
        np.array([s.accepted for s in fresh], np.int32),
    )
    assert losses(after.champion, rows).mean() < 0.9 * losses(before.champion, rows).mean()


def test_nothing_is_learnt_from_a_handful() -> None:
    learner = learned(0.9, 3)
    assert learner.champion is START
    assert np.array_equal(learner._challenger.predictor().layers[0].weight, START.layers[0].weight)


def test_who_has_lost_its_numbers_starts_anew() -> None:
    learner = learned(0.9, 10)
    learner._challenger._values[0][:] = np.nan
    rng = np.random.default_rng(7)
    for _ in range(10):
        for _ in range(64):
            learner.add(law(rng, 0.9))
        learner.improve()
    assert np.isfinite(learner.champion.layers[0].weight).all()
    assert np.isfinite(learner._challenger.predictor().layers[0].weight).all()


def test_the_buffer_keeps_the_latest() -> None:
    buffer = Buffer(10)
    rng = np.random.default_rng(0)
    for accepted in range(25):
        buffer.add(law(rng, 0.9)._replace(accepted=accepted))
    assert len(buffer) == 10
    assert buffer.between(0, 25).accepted.tolist() == list(range(15, 25))
    assert buffer.between(22, 25).accepted.tolist() == [22, 23, 24]
    assert set(buffer.sample(rng, 200).accepted.tolist()) == set(range(15, 25))

"""Training the predictor on states whose law is known, and judging it."""

import numpy as np
import torch

from verdraft.spec.features import FEATURES
from verdraft.spec.predictor import LENGTHS, MEAN_UNIT
from verdraft.spec.replay import RecordedAnswer, States
from verdraft.train.payoff import Labels, PayoffRecipe, about, payoff_loss, train_predictor
from verdraft.train.payoff_report import calibration, qualities, report

QUICK = PayoffRecipe(epochs=30, batch=256, learning_rate=3e-3)


def law_of_the_score(num: int = 4000) -> States:
    """Drafts of 12 tokens, each right with probability 0.5 or, where the score says so, 0.95."""
    rng = np.random.default_rng(0)
    good = rng.random(num) < 0.5
    right = rng.random((num, 12)) < np.where(good, 0.95, 0.5)[:, None]
    accepted = np.where(right.all(1), 12, right.argmin(1)).astype(np.int32)
    features = np.zeros((num, len(FEATURES)), np.float32)
    features[:, 0] = good
    answers = tuple(RecordedAnswer("x", str(i), (), (), held_out=i == 1) for i in range(2))
    answer = (np.arange(num) % 2).astype(np.int32)
    position = np.arange(num, dtype=np.int32)
    return States(features, np.full(num, 12, np.int32), accepted, answer, position, answers, np.array([num, num + 1]))


STATES = law_of_the_score()
TRAINED = train_predictor(STATES, QUICK, progress=False)


def test_it_learns_the_mean_and_the_survival_of_a_known_law() -> None:
    rows = np.zeros((2, len(FEATURES)), np.float32)
    rows[1, 0] = 1.0
    mean, survival = TRAINED.predict(rows)
    for i, p in enumerate((0.5, 0.95)):
        expected = p ** np.arange(1, 13)
        assert abs(mean[i] - expected.sum()) < 0.5
        assert np.allclose(survival[i, :12], expected, atol=0.08)


def test_training_is_deterministic_and_the_seed_matters() -> None:
    short = PayoffRecipe(epochs=1, batch=512)
    same = [train_predictor(STATES, short, progress=False) for _ in range(2)]
    assert np.array_equal(same[0].layers[0].weight, same[1].layers[0].weight)
    other = train_predictor(STATES, PayoffRecipe(epochs=1, batch=512, seed=1), progress=False)
    assert not np.array_equal(same[0].layers[0].weight, other.layers[0].weight)


def test_held_out_states_teach_nothing() -> None:
    short = PayoffRecipe(epochs=1, batch=512)
    changed = STATES.features.copy()
    changed[STATES.held_out] = 7.0
    taught = [
        train_predictor(States(features, *rest), short, progress=False)
        for features, rest in ((f, _rest(STATES)) for f in (STATES.features, changed))
    ]
    assert np.array_equal(taught[0].layers[0].weight, taught[1].layers[0].weight)


def _rest(states: States) -> tuple[object, ...]:
    return (states.drafted, states.accepted, states.answer, states.position, states.answers, states.lengths)


def test_the_loss_counts_accepted_tokens_the_first_wrong_one_and_nothing_behind() -> None:
    out = torch.zeros(3, 1 + LENGTHS)
    labels, ones = Labels(torch.tensor([4.0, 2.0, 20.0]), torch.tensor([1.0, 2.0, 20.0])), torch.ones(3)
    judged = 2 + 2 + LENGTHS
    mean = ((labels.accepted / MEAN_UNIT) ** 2).mean()
    assert torch.isclose(payoff_loss(out, labels, ones), mean + np.log(2.0))
    out[0, 3:] = 50.0  # behind the first wrong token
    out[1, 3:] = -50.0  # behind the draft's end
    assert torch.isclose(payoff_loss(out, labels, ones), mean + np.log(2.0))
    out[0, 2] = 50.0
    assert torch.isclose(payoff_loss(out, labels, ones), mean + (np.log(2.0) * (judged - 1) + 50.0) / judged)


def test_a_state_counts_as_much_as_its_weight() -> None:
    out = torch.randn(3, 1 + LENGTHS, generator=torch.Generator().manual_seed(0))
    labels = Labels(torch.tensor([4.0, 4.0, 9.0]), torch.tensor([1.0, 1.0, 6.0]))
    twice = torch.tensor([0, 0, 2])
    alone = payoff_loss(out[twice], labels.of(twice), torch.ones(3))
    assert torch.isclose(payoff_loss(out, labels, torch.tensor([2.0, 0.0, 1.0])), alone)


def test_the_report_compares_with_what_happened() -> None:
    every = qualities(STATES, TRAINED)
    assert [quality.workload for quality in every] == ["x", "all"]
    quality = every[0]
    high = STATES.accepted[STATES.held_out] >= 6
    said = STATES.features[STATES.held_out, 0] == 1  # the trained mean is above 6 there and nowhere else
    assert np.isclose(quality.precision, high[said].mean())
    assert np.isclose(quality.recall, said[high].mean())
    assert quality.positions == len(STATES.drafted)
    assert quality.drafts == STATES.held_out.sum()
    assert np.isclose(quality.high_share, high.sum() / quality.positions)
    assert quality.calibration_error < 0.08
    assert quality.error < quality.score_error


def test_calibration_bins_hold_every_draft_that_is_long_enough() -> None:
    survival = TRAINED.predict(STATES.features).survival
    table = calibration(STATES, survival, 4, STATES.held_out)
    assert sum(num for _, _, num in table) == STATES.held_out.sum()
    assert calibration(STATES, survival, 16, STATES.held_out) == []


def test_the_record_tells_data_recipe_and_figures() -> None:
    record, lines = report(STATES, TRAINED)
    recipe = about(STATES, QUICK)["recipe"]
    assert (recipe["epochs"], recipe["batch"], recipe["learning_rate"], recipe["seed"]) == (30, 256, 3e-3, 42)
    assert record["held_out"][0]["workload"] == "x"
    assert any(line.startswith("x ") for line in lines)

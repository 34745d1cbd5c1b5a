"""The prediction source: right predictions are taken, departures are survived, wrong ones cost little."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verdraft.spec.draft import EMPTY
from verdraft.spec.prediction import PredictionDrafter

Decode = Callable[..., Any]
TEXT = [random.Random(1).randrange(40) for _ in range(300)]


def share(decode: Decode, prediction: list[int], output: list[int], limit: int = 32) -> float:
    """Share of the output that was drafted and accepted."""
    return float(decode(PredictionDrafter(prediction), [], output, limit).num_accepted) / len(output)


@pytest.mark.parametrize("limit", [4, 8, 16, 64])
def test_a_right_prediction_is_accepted_for_the_most_part(decode: Decode, limit: int) -> None:
    result = decode(PredictionDrafter(TEXT), [1, 2], TEXT, limit)
    assert result.num_accepted > 0.75 * len(TEXT)
    assert result.num_rejected == 0
    assert result.drafts[0].source == "prediction"


def test_drafts_grow_to_the_limit(decode: Decode) -> None:
    lengths = [len(draft.tokens) for draft in decode(PredictionDrafter(TEXT), [], TEXT, 64).drafts]
    assert lengths[:4] == [16, 32, 64, 64]


def test_it_goes_on_behind_replaced_inserted_deleted_and_moved_parts(decode: Decode) -> None:
    new = list(range(100, 110))
    assert share(decode, TEXT, [*TEXT[:100], 99, *TEXT[101:]]) > 0.8
    assert share(decode, TEXT, [*TEXT[:100], *new, *TEXT[110:]]) > 0.8
    assert share(decode, TEXT, [*TEXT[:100], *new, *TEXT[100:]]) > 0.8
    assert share(decode, TEXT, [*TEXT[:100], *TEXT[150:]]) > 0.8
    assert share(decode, TEXT, [*TEXT[150:], *TEXT[:150]]) > 0.8
    assert share(decode, TEXT, [*new, *TEXT]) > 0.8


def test_one_name_replaced_in_many_places(decode: Decode) -> None:
    output = [99 if i % 25 == 24 else token for i, token in enumerate(TEXT)]
    assert share(decode, TEXT, output) > 0.75


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([2, 5, 50, 5000]), st.integers(1, 64), st.integers(1, 400))
def test_waste_is_bounded_at_every_moment(decode: Decode, seed: int, vocab: int, limit: int, size: int) -> None:
    """64 + 8 per token is the promise; what happens is far less."""
    rng = random.Random(seed)
    prediction = [rng.randrange(vocab) for _ in range(size)]
    output = [rng.randrange(vocab) for _ in range(rng.randrange(1, 300))]
    drafter = PredictionDrafter(prediction)
    result = decode(drafter, [], output, limit)
    assert all(rejected <= 64 + 8 * done for done, rejected in result.rejected_after)
    assert drafter.num_rejected <= result.num_rejected


def test_the_bound_holds_against_the_worst_output(decode: Decode) -> None:
    """The output always agrees just long enough to be believed, and then departs."""
    prediction = [i % 7 for i in range(400)]
    output: list[int] = []
    for length in (3, 9, 4, 17, 3, 8, 3, 3, 9, 9, 3, 33, 3) * 8:
        output += [*prediction[:length], 50]
    result = decode(PredictionDrafter(prediction), [], output, 64)
    assert all(rejected <= 64 + 8 * done for done, rejected in result.rejected_after)


def test_an_unrelated_prediction_is_given_up(decode: Decode) -> None:
    rng = random.Random(5)
    prediction = [rng.randrange(30) for _ in range(2000)]
    output = [rng.randrange(30) for _ in range(1000)]
    result = decode(PredictionDrafter(prediction), [], output, 32)
    assert result.num_rejected < 0.5 * len(output)


def test_a_draft_that_was_cut_before_verification_is_no_rejection() -> None:
    drafter = PredictionDrafter(TEXT)
    drafter.start([])
    assert drafter.propose(16).tokens == tuple(TEXT[:16])
    drafter.extend(TEXT[:3])
    assert drafter.num_rejected == 0
    assert drafter.propose(16).tokens == tuple(TEXT[3:19])


def test_tokens_of_other_sources_move_the_cursor() -> None:
    drafter = PredictionDrafter(TEXT)
    drafter.start([])
    drafter.extend(TEXT[:50])
    assert drafter.propose(4).tokens == tuple(TEXT[50:54])


@pytest.mark.parametrize("prediction", [[], [1], [1, 2]])
def test_tiny_predictions(decode: Decode, prediction: list[int]) -> None:
    result = decode(PredictionDrafter(prediction), [], [1, 2, 3, 1, 2, 3, 1, 2, 3])
    assert result.num_accepted <= len(prediction) + 2


def test_nothing_is_proposed_behind_the_end_or_without_room() -> None:
    drafter = PredictionDrafter([1, 2, 3])
    drafter.start([])
    assert drafter.propose(0) == EMPTY
    drafter.extend([1, 2, 3])
    assert drafter.propose(8) == EMPTY
    drafter.extend([9])
    assert drafter.propose(8) == EMPTY


def test_misuse_raises() -> None:
    drafter = PredictionDrafter([1, 2, 3])
    with pytest.raises(RuntimeError, match="new"):
        drafter.propose(3)
    drafter.start([])
    with pytest.raises(RuntimeError, match="running"):
        drafter.start([])
    drafter.stop()
    with pytest.raises(RuntimeError, match="stopped"):
        drafter.extend([1])

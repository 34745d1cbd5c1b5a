"""Drafts shrink as rows get dear, the likeliest tokens stay."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verdraft.spec.spending import FREE, CostTable, Reading, spend

LINEAR = CostTable((1, 2), (1.0, 2.0))  # a second row costs as much as the first
LAPTOP = CostTable((1, 8, 16, 64), (30.0, 34.0, 44.0, 98.0))


def test_free_rows_take_every_draft_whole() -> None:
    assert spend([[0.9, 0.1], [0.01], []], 3, FREE) == [2, 1, 0]


def test_a_row_as_dear_as_a_pass_takes_certain_tokens_alone() -> None:
    assert spend([[1.0, 1.0, 0.9]], 1, LINEAR) == [2]


def test_the_same_draft_shrinks_under_load() -> None:
    draft = [0.9, 0.6, 0.4, 0.2, 0.1]
    lengths = [spend([draft] * n, n, LAPTOP)[0] for n in (1, 8, 32)]
    assert lengths[0] == 5
    assert lengths[0] >= lengths[1] >= lengths[2]
    assert lengths[2] < 5


def test_beyond_the_table_a_pass_grows_in_proportion() -> None:
    assert LAPTOP.of(128) == 196.0
    assert LAPTOP.of(4) < LAPTOP.of(8)
    assert LAPTOP.of(4.5) == pytest.approx((LAPTOP.of(4) + LAPTOP.of(5)) / 2)
    assert LAPTOP.of(64) == 98.0


def test_a_steep_step_is_taken_when_what_lies_behind_it_is_flat() -> None:
    stairs = CostTable((1, 4, 5, 16, 32), (10.0, 10.0, 20.0, 20.0, 40.0))
    draft = [0.97**i for i in range(1, 16)]
    assert spend([draft], 1, stairs) == [15]
    assert spend([draft[:5]], 1, stairs) == [3]
    assert stairs.least_more(2) == 0.0
    assert stairs.least_more(20) == 1.25


def test_every_sequence_reads_its_context_once_and_its_rows_add_little() -> None:
    reading = Reading(sequence=0.01, row=0.001, context=100)
    assert reading.costs(LAPTOP, [100]).of(8) == LAPTOP.of(8)
    costs = reading.costs(LAPTOP, [300, 700])
    assert costs.of(8) == pytest.approx(LAPTOP.of(8) + 0.01 * 900 + 0.001 * 400 * 8)
    assert costs.least_more(1) == pytest.approx(LAPTOP.least_more(1) + 0.001 * 400)


def test_drafts_grow_where_passes_are_dear_anyway() -> None:
    draft, reading = [0.5, 0.2, 0.1], Reading(sequence=0.01, context=100)
    lengths = [spend([draft] * 8, 8, reading.costs(LAPTOP, [context] * 8))[0] for context in (10, 1000, 10_000)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


@given(st.lists(st.lists(st.floats(0.01, 1.0), max_size=6), min_size=1, max_size=6))
def test_what_is_chosen_is_never_worse_than_no_draft(drafts: list[list[float]]) -> None:
    probs = [sorted(draft, reverse=True) for draft in drafts]
    lengths = spend(probs, len(probs), LAPTOP)
    expected = len(probs) + sum(sum(draft[:n]) for draft, n in zip(probs, lengths, strict=True))
    assert all(n <= len(draft) for n, draft in zip(lengths, probs, strict=True))
    rate = expected / LAPTOP.of(len(probs) + sum(lengths))
    assert rate >= len(probs) / LAPTOP.of(len(probs)) * (1 - 1e-9)


@given(st.lists(st.lists(st.floats(0.01, 1.0), max_size=3), min_size=1, max_size=3))
def test_no_other_lengths_are_better(drafts: list[list[float]]) -> None:
    stairs = CostTable((1, 2, 3, 8, 32), (10.0, 11.0, 18.0, 20.0, 80.0))
    probs = [sorted(draft, reverse=True) for draft in drafts]

    def rate(lengths: Sequence[int]) -> float:
        expected = len(probs) + sum(sum(draft[:n]) for draft, n in zip(probs, lengths, strict=True))
        return expected / stairs.of(len(probs) + sum(lengths))

    best = max(map(rate, itertools.product(*(range(len(draft) + 1) for draft in probs))))
    assert rate(spend(probs, len(probs), stairs)) >= best * (1 - 1e-9)

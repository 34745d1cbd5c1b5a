"""Windows: how many tokens of which exit they take, and where they close."""

import pytest

from verdraft.spec.window import Cycle, Window


def window(checked: bool, limit: int = 4, round_len: int = 2, ends: frozenset[int] = frozenset()) -> Window:
    return Window(Cycle(limit, round_len, checked), limit, ends)


def test_without_a_check_the_drafting_exit_fills_the_window():
    filled = window(checked=False)
    for token in (5, 6, 7, 8):
        assert filled.wants_draft
        assert not filled.wants_check
        filled.draft(token, sure=True)
    assert (filled.tokens, filled.closed) == ([5, 6, 7, 8], True)


def test_the_last_token_of_a_round_is_the_checks_own():
    filled = window(checked=True, round_len=3)
    filled.draft(5, sure=True)
    assert filled.wants_draft
    filled.draft(6, sure=True)
    assert not filled.wants_draft
    assert filled.unchecked == (5, 6)
    filled.check([5, 6, 7], [True] * 3)
    assert (filled.tokens, filled.unchecked, filled.closed) == ([5, 6, 7], (), False)
    assert not filled.wants_draft  # the one token that has room is the check's own
    filled.check([8], [True])
    assert (filled.tokens, filled.closed) == ([5, 6, 7, 8], True)


def test_the_check_replaces_the_first_failure_and_drops_what_follows():
    filled = window(checked=True, limit=6, round_len=4)
    for token in (5, 6, 7):
        filled.draft(token, sure=True)
    filled.check([5, 9], [True] * 2)
    assert (filled.tokens, filled.num_checked, filled.closed) == ([5, 9], 2, False)


@pytest.mark.parametrize("checked", [False, True])
def test_an_unsure_draft_is_dropped_and_leaves_the_place_to_who_knows_better(checked):
    filled = window(checked)
    filled.draft(5, sure=False)
    assert filled.tokens == []
    assert not filled.wants_draft
    assert filled.wants_check == checked
    assert filled.closed != checked


def test_an_unsure_check_closes_the_window_before_its_token():
    filled = window(checked=True)
    filled.draft(5, sure=True)
    filled.check([5, 6], [True, False])
    assert (filled.tokens, filled.closed) == ([5], True)


def test_a_check_that_has_nothing_to_say_closes_the_window():
    filled = window(checked=True)
    filled.draft(5, sure=True)
    filled.check([], [])
    assert (filled.tokens, filled.closed) == ([], True)


@pytest.mark.parametrize("checked", [False, True])
def test_nothing_is_drafted_behind_an_end(checked):
    filled = window(checked, limit=6, round_len=4, ends=frozenset({2}))
    filled.draft(5, sure=True)
    filled.draft(2, sure=True)
    assert not filled.wants_draft
    if checked:
        filled.check([5, 2, 7], [True] * 3)
    assert (filled.tokens, filled.closed) == ([5, 2], True)

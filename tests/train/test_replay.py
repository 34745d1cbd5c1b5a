"""Replay of exits on recorded text, and the price of a cycle."""

import numpy as np
import pytest
import torch

from verdraft.spec.spending import CostTable
from verdraft.train.choose import Exit, Times, early_exit_speed, hierarchical_speed
from verdraft.train.replay import Cycles, Trace, early_exit_cycles, greedy_trace, hierarchical_cycles


def trace(draft: str, check: str, agree: str = "") -> Trace:
    """One sequence; 1: the head is right there. Heads that are both wrong agree unless told."""
    right, right_i = (np.array([c == "1" for c in text]) for text in (draft, check))
    same = np.array([c == "1" for c in agree]) if agree else right == right_i
    return Trace(np.arange(len(draft), 0, -1), right, right_i, same)


@pytest.mark.parametrize(
    ("draft", "length", "expected"),
    [
        ("1111", 3, Cycles(1, 4, 3, 3, 3, 0)),
        ("0000", 2, Cycles(4, 4, 8, 0, 8, 0)),
        ("1010", 2, Cycles(2, 4, 4, 2, 4, 0)),
    ],
)
def test_early_exit_keeps_drafts_up_to_the_first_wrong_one(draft: str, length: int, expected: Cycles) -> None:
    assert early_exit_cycles(trace(draft, draft), length) == expected


def test_perfect_heads_fill_the_window_and_get_a_bonus() -> None:
    assert hierarchical_cycles(trace("11111", "11111"), 2, 4) == Cycles(1, 5, 4, 4, 2, 2)


def test_the_middle_head_mends_a_wrong_draft() -> None:
    """Draft wrong at the first token, mended; then two agree: 3 tokens in two rounds."""
    assert hierarchical_cycles(trace("0111", "1111"), 2, 3) == Cycles(1, 4, 3, 3, 2, 2)


def test_behind_a_wrong_token_the_window_is_filled_in_vain() -> None:
    """Both heads agree on a wrong first token: nothing of that window is kept, but all four were drafted. The next
    window ends with the text."""
    assert hierarchical_cycles(trace("0111", "0111"), 2, 4) == Cycles(2, 4, 4 + 3, 3, 4, 2 + 2)


def test_sequences_and_sampled_text_are_told_apart() -> None:
    rows = {
        "own": torch.tensor([False, True, True, True, True]),
        "greedy": torch.tensor([True, True, True, False, True]),
        "next": torch.tensor([1, 2, 3, 4, 5]),
        "sequence": torch.tensor([0, 0, 0, 1, 2]),
    }
    found = greedy_trace(rows, np.array([9, 2, 9, 4, 5]), np.array([9, 2, 3, 4, 9]))
    assert found.run.tolist() == [2, 1, 1]
    assert found.draft_right.tolist() == [True, False, True]
    assert found.check_right.tolist() == [True, True, False]
    assert found.agree.tolist() == [True, False, False]


def test_the_cost_model_is_that_of_the_paper_when_rows_are_free() -> None:
    """PAPERS 2.9: c_d = 1/8, c_i = 1/4, no head costs, N_d = 2, N_i = 4, 2.5 rounds: about 1.7 full passes a cycle, to
    which the last window token's own way through the first two segments is added."""
    times = Times(32, CostTable((1,), (1 / 32,)), CostTable((1,), (0.0,)))
    free = CostTable((1, 128), (0.0, 0.0))
    flat = Times(32, CostTable((1, 128), (1 / 32, 1 / 32)), CostTable((1, 128), (0.0, 0.0)))
    cycles = Cycles(num=2, tokens=6, verified=8, accepted=4, drafts=5, checks=5)
    speed = hierarchical_speed(flat, Exit(4, free), Exit(8, free), 2, cycles)
    assert speed == pytest.approx(3 / (2.5 * (2 / 8 + 1 / 8) + 3 / 4 + 1 / 4))
    assert times.plain(1) == pytest.approx(1.0)


def test_early_exit_pays_for_its_drafts_and_the_rows_of_the_last_pass() -> None:
    times = Times(8, CostTable((1, 4), (1.0, 2.5)), CostTable((1, 4), (2.0, 5.0)))
    cycles = Cycles(num=1, tokens=3, verified=3, accepted=2, drafts=3, checks=0)
    first, last = 3 * (2 * 1.0 + 0.5) + 2 * 1.0, 6 * 2.5 + 5.0
    head = CostTable((1, 4), (0.5, 0.5))
    assert early_exit_speed(times, Exit(2, head), 3, cycles) == pytest.approx(3 * 10.0 / (first + last))

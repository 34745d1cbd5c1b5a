"""How long parts of a step take beside one another."""

import pytest

from verdraft.spec.pace import Pace


def learned(filling: float, split: float, whole: float) -> Pace:
    pace = Pace()
    for _ in range(200):
        pace.filled(2.0, 2.0 * filling)
        pace.passed(3.0, 3.0 * split, split=True)
        pace.passed(4.0, 4.0 * whole, split=False)
    return pace


def test_a_slow_machine_changes_nothing():
    alone, busy = learned(1.8, 1.2, 1.0), learned(2.7, 1.8, 1.5)
    assert (alone.filling, alone.split) == pytest.approx((1.8, 1.2))
    assert (busy.filling, busy.split) == pytest.approx((1.8, 1.2))


def test_nothing_is_quicker_than_it_was_when_it_was_measured():
    pace = learned(0.5, 0.7, 1.0)
    assert (pace.filling, pace.split) == (1.0, 1.0)


def test_one_disturbance_is_soon_forgotten():
    pace = learned(1.5, 1.1, 1.0)
    pace.passed(1.0, 1000.0, split=True)
    assert pace.split < 1.5
    for _ in range(30):
        pace.passed(1.0, 1.1, split=True)
    assert pace.split == pytest.approx(1.1, abs=0.02)

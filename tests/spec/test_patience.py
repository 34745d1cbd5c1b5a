"""Steps that wait and draft, and steps that do not: the kind that brings more tokens a second is taken."""

import random

import pytest

from verdraft.spec.patience import LONGEST_REST, SPAN, Patience


def share_of_waiting(rates, steps, load=8, patience=None, noise=0.0):
    """How many of so many steps wait where a step of either kind brings so many tokens a second."""
    rnd, patience, now, waited = random.Random(1), patience or Patience(), 0.0, []
    for _ in range(steps):
        waits = patience.waits(load)
        now += load / rates[waits] * rnd.uniform(1 - noise, 1 + noise)
        patience.learn(load, waits, load, now)
        waited.append(waits)
    return waited


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("better", [True, False])
def test_the_quicker_kind_is_taken_in_nearly_all_steps(better, noise):
    waited = share_of_waiting({better: 1300.0, not better: 1000.0}, 20_000, noise=noise)
    assert sum(waits is better for waits in waited[2000:]) / 18_000 > 0.97


def test_it_follows_what_changes():
    patience = Patience()
    share_of_waiting({True: 1000.0, False: 1300.0}, 5000, patience=patience)
    waited = share_of_waiting({True: 1300.0, False: 1000.0}, 2 * SPAN * LONGEST_REST + 2000, patience=patience)
    assert sum(waited[-1000:]) > 950


def test_every_load_has_its_own():
    patience = Patience()
    share_of_waiting({True: 1000.0, False: 1300.0}, 3000, load=64, patience=patience)
    assert patience.waits(1)
    share_of_waiting({True: 1300.0, False: 1000.0}, 3000, load=1, patience=patience)
    assert sum(share_of_waiting({True: 1000.0, False: 1300.0}, 500, load=64, patience=patience)) < 100


def test_a_pause_is_no_step():
    """Nobody came for an hour: that says nothing about either kind."""
    patience, now = Patience(), 0.0
    for i in range(4000):
        waits = patience.waits(2)
        if i % 3 == 0 and not waits:
            now += 3600.0
            patience.pause()
        now += 2 / {True: 1000.0, False: 1300.0}[waits]
        patience.learn(2, waits, 2, now)
    assert not patience.waits(2)

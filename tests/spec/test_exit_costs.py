"""When windows pay: the cost model, and what agreement teaches."""

import pytest

from verdraft.spec.agreement import FLOOR, Agreement
from verdraft.spec.exit_costs import ExitCosts
from verdraft.spec.pruning import Pruning
from verdraft.spec.spending import CostTable
from verdraft.spec.window import Cycle

EARLY, CHECKED = Cycle(8, 2, False), Cycle(8, 2, True)


def flat(seconds: float) -> CostTable:
    return CostTable((1, 128), (seconds, seconds))


def costs(head: float = 0.0, per_row: float = 0.0) -> ExitCosts:
    """Eighths: exits after the first and the second, rows nearly free."""
    full = CostTable((1, 129), (8.0, 8.0 + 128 * per_row))
    return ExitCosts(full, flat(1.0), flat(1.0), flat(head), flat(head))


def test_without_costs_every_window_is_full():
    assert ExitCosts().best_length(EARLY, 0.1, 0.1) == 8


def test_the_model_is_that_of_the_papers_notes():
    """PAPERS 2.9: layers alone, L_d 1/8, L_i 1/4; early exit with two drafts: (2 + 8) / 8 passes for 1 + a + a^2."""
    assert costs().speed(EARLY, 2, 0.7, 1.0) == pytest.approx((1 + 0.7 + 0.49) / 10.0)
    # Two rounds of one draft and one token of the check's own: 2 (1 + 2), and 8 for the pass that confirms.
    assert costs().speed(CHECKED, 4, 0.7, 1.0) == pytest.approx(sum(0.7**i for i in range(5)) / 14.0)


def test_windows_grow_with_agreement_and_shrink_with_load():
    lengths = [costs(0.2).best_length(EARLY, keep, keep) for keep in (0.05, 0.5, 0.7, 0.9)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1] > 2) == (0, True)
    busy = costs(0.2, per_row=0.5)
    assert busy.best_length(EARLY, 0.7, 0.7, 32, 32) < busy.best_length(EARLY, 0.7, 0.7)


def test_costly_heads_raise_the_break_even_until_nothing_pays():
    levels = [costs(head).break_even(EARLY) for head in (0.0, 1.0, 3.0)]
    assert levels == sorted(levels)
    assert levels[0] < levels[-1]
    assert costs(20.0).break_even(EARLY) > 1


def test_agreement_gives_up_below_its_floor_but_not_before_a_trial():
    agreement = Agreement(0.5)
    agreement.learn(4, 0)
    assert not agreement.given_up
    for _ in range(30):
        agreement.learn(4, 0)
    assert agreement.rate < FLOOR
    assert agreement.given_up


def test_agreement_judges_only_what_the_full_model_looked_at():
    """Tokens behind the first rejected one were neither right nor wrong."""
    one, many = Agreement(), Agreement()
    one.learn(3, 2)
    many.learn(30, 2)
    assert one.rate == many.rate
    assert one.probs(2) == pytest.approx((one.rate, one.rate**2))


def test_pruning_pays_only_for_an_exit_that_tells_right_from_wrong():
    long_shot = tuple(0.5 ** (i + 1) for i in range(12))
    steep = ExitCosts(CostTable((1, 33), (8.0, 40.0)), flat(0.1), flat(0.1), flat(0.1), flat(0.1))
    ignorant, knowing = Pruning(), Pruning()
    for _ in range(50):
        ignorant.learn([True, True], 1)
        knowing.learn([True, False], 1)
    assert not Pruning().pays(steep, long_shot, rows=1)
    assert not ignorant.pays(steep, long_shot, rows=1)
    assert knowing.pays(steep, long_shot, rows=1)
    assert not knowing.pays(costs(), long_shot, rows=1)  # where rows are free, nothing is to be saved
    assert not knowing.pays(ExitCosts(), long_shot, rows=1)


def test_pruning_learns_from_judged_tokens_alone():
    pruning = Pruning()
    before = pruning.right.rate, pruning.wrong.rate
    pruning.learn([False, False, True], 3)
    assert pruning.right.rate < before[0]
    assert pruning.wrong.rate == before[1]
    pruning.learn([True, False, False, False], 1)
    assert pruning.wrong.rate < before[1]

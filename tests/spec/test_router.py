"""Routes: who drafts how in a step, by what it brings and takes."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verdraft.spec.asking import Asking
from verdraft.spec.ledger import Ledger
from verdraft.spec.router import Arm, Plan, Route, by_score, free_plan, loss, payoff, use
from verdraft.spec.spending import CostTable
from verdraft.spec.trials import Trials

LAPTOP = CostTable((1, 8, 16, 64), (30.0, 34.0, 44.0, 98.0))
STEEP = CostTable((1, 64), (30.0, 30.0 * 64))  # every row costs as much as the first


def arm(name: str, hopes: dict[int, Sequence[float]], seconds: float = 0.0) -> Arm:
    """A model that takes so many seconds for each level, whoever takes part."""
    return Arm(name, hopes, lambda count, length, rows: seconds * length)


def model(share: float, sequences: int, length: int = 4, seconds: float = 3.0) -> Arm:
    """One whose tokens are right so often."""
    hopes = [sum(share ** (j + 1) for j in range(n + 1)) for n in range(length)]
    return arm("model", dict.fromkeys(range(sequences), hopes), seconds)


def test_a_free_draft_that_is_good_needs_no_model() -> None:
    plan = payoff([[0.99, 0.98, 0.97, 0.96, 0.95]], [model(0.5, 1)], LAPTOP)
    assert plan.routes == (Route(None, 5),)


def test_a_model_drafts_where_nothing_is_free() -> None:
    plan = payoff([[0.9] * 5, []], [model(0.8, 2, seconds=1.0)], LAPTOP)
    assert plan.routes[0] == Route(None, 5)
    assert plan.routes[1].arm == "model"
    assert plan.routes[1].length > 1


def test_a_model_that_is_slow_or_wrong_drafts_nothing() -> None:
    for bad in (model(0.8, 1, seconds=30.0), model(0.05, 1)):
        assert payoff([[]], [bad], LAPTOP).routes == (Route(None, 0),)


def test_lockstep_shares_the_time_of_drafting() -> None:
    """What pays for nobody alone may pay for several together."""
    slow = model(0.7, 4, length=1, seconds=16.0)
    assert payoff([[]], [model(0.7, 1, length=1, seconds=22.0)], LAPTOP).routes[0].arm is None
    assert payoff([[], [], [], []], [slow], LAPTOP).routes == (Route("model", 1),) * 4


def test_under_load_nothing_pays() -> None:
    assert payoff([[0.9, 0.8]] * 4, [model(0.9, 4)], STEEP).routes == (Route(None, 0),) * 4


def test_trees_are_priced_by_their_nodes() -> None:
    chain = Arm("model", {0: [0.6, 1.0]}, lambda *_: 0.0)
    tree = Arm("model", {0: [0.6, 1.0]}, lambda *_: 0.0, rows_at={0: (20, 40)})
    assert use(free_plan([[]], LAPTOP), tree, [0], 2, [[]]).outlook.rows == 41
    assert payoff([[]], [chain], LAPTOP).routes == (Route("model", 2),)
    assert payoff([[]], [tree], LAPTOP).routes == (Route(None, 0),)


def test_a_trial_is_priced_by_what_it_loses() -> None:
    bad = model(0.1, 2, seconds=10.0)
    plan = free_plan([[], []], LAPTOP)
    trial = use(plan, bad, [1], 1, [[], []])
    assert trial.routes == (Route(None, 0), Route("model", 1))
    # 10 of drafting and two rows' difference, less a tenth of a token at the rate of plain decoding
    expected = 10.0 + LAPTOP.of(3) - LAPTOP.of(2) - 0.1 * LAPTOP.of(2) / 2
    assert loss(plan, trial, LAPTOP) == pytest.approx(expected / LAPTOP.of(2))


def test_hvd_takes_the_free_draft_above_the_threshold_and_a_model_below() -> None:
    eagle, exits = arm("eagle", {0: [0.5] * 8}), arm("exits", {0: [0.5] * 4, 1: [0.5] * 4})
    free = [[0.9] * 3, [0.9] * 3, [0.9] * 3]
    assert by_score(free, [6.0, 6.0, 6.0], 6.0, [eagle, exits]).routes == (
        Route("eagle", 8),
        Route("exits", 4),
        Route(None, 0),
    )
    assert by_score(free, [6.1, 7.0, 9.0], 6.0, [eagle, exits]).routes == (Route(None, 3),) * 3


probabilities = st.lists(st.floats(0.01, 1.0), max_size=6).map(lambda probs: sorted(probs, reverse=True))


@given(st.lists(probabilities, min_size=1, max_size=6), st.floats(0.0, 1.0), st.floats(0.0, 30.0))
def test_what_is_chosen_is_never_worse_than_no_draft(free: list[list[float]], share: float, seconds: float) -> None:
    offered = model(share, len(free), seconds=seconds)
    plan = payoff(free, [offered], LAPTOP)
    assert plan.outlook.rate(LAPTOP) >= free_plan(free, LAPTOP).outlook.rate(LAPTOP)
    assert free_plan(free, LAPTOP).outlook.rate(LAPTOP) >= len(free) / LAPTOP.of(len(free)) * (1 - 1e-9)
    assert plan.outlook == _recounted(plan, free, offered)


def _recounted(plan: Plan, free: list[list[float]], offered: Arm) -> object:
    """The outlook by the routes alone."""
    tokens, rows, users = float(len(free)), len(free), 0
    for i, route in enumerate(plan.routes):
        rows += route.length
        users += route.arm is not None
        tokens += sum(free[i][: route.length]) if route.arm is None else offered.expected(i, route.length)
    length = max((route.length for route in plan.routes if route.arm), default=0)
    drafting = offered.seconds(users, length, rows)
    return type(plan.outlook)(pytest.approx(tokens), rows, pytest.approx(drafting))


def test_a_source_that_brings_too_little_is_asked_now_and_then() -> None:
    asking = Asking()
    for _ in range(50):
        if asking.pays("vain"):
            asking.learn("vain", -1e-5)
        if asking.pays("worth it"):
            asking.learn("worth it", 1e-3)
    assert sum(asking.pays("vain") for _ in range(160)) == 10
    assert all(asking.pays("worth it") for _ in range(160))
    for _ in range(3):
        asking.learn("vain", 1e-3)  # things have changed
    assert all(asking.pays("vain") for _ in range(16))


def test_trials_cost_a_small_share_of_the_time() -> None:
    trials, lost = Trials(), 0.0
    for _ in range(10_000):
        trials.earn()
        lost += 2.0 if trials.may_spend(2.0) else 0.0
    assert 0.0015 < lost / 10_000 < 0.003


def test_trials_pay_what_they_lost_in_the_end() -> None:
    trials = Trials()
    assert trials.may_spend(0.5)
    trials.settle(0.5, 3.0)
    assert not trials.may_spend(0.1)
    trials.settle(0.0, -3.0)  # one that won
    assert trials.may_spend(0.5)


def steps_awake(ledger: Ledger, num_steps: int, saved: float | None, ready: float = 0.0) -> list[bool]:
    """Whether a model is awake in each step, if every use saves that much (None: it is never used) and to be ready for
    one takes `ready`."""
    found = []
    for _ in range(num_steps):
        ledger.step()
        found.append(not ledger.rests("model"))
        if found[-1]:
            ledger.charge("model", ready)
        if found[-1] and saved is not None:
            ledger.enter("model", saved)
    return found


def test_a_model_that_saves_less_than_being_ready_takes_rests() -> None:
    assert all(steps_awake(Ledger(), 1000, 0.03, ready=0.02))
    awake = steps_awake(Ledger(), 10_000, 0.02, ready=0.03)
    assert sum(awake) < 0.1 * len(awake)
    unused = steps_awake(Ledger(), 10_000, None, ready=0.1)
    assert unused[:12] == [True] * 11 + [False]
    assert sum(unused) < 0.02 * len(unused)


def test_a_model_that_just_breaks_even_rests_longer_each_time() -> None:
    """Surviving a few uses once made the next rest a short one again."""
    ledger = Ledger()
    lengths = [sum(not awake for awake in steps_awake(ledger, 300, -0.01 if turn % 2 else 0.001)) for turn in range(8)]
    assert lengths[-1] == 300


def test_a_model_that_loses_rests_longer_and_longer() -> None:
    ledger = Ledger()
    assert all(steps_awake(ledger, 200, 1e-3))
    awake = steps_awake(ledger, 10_000, -1e-3)
    assert sum(awake) < 0.02 * len(awake)
    assert any(awake[-1200:])  # it is never given up


def test_a_model_rests_after_one_lost_step_however_few_its_uses() -> None:
    ledger = Ledger()
    assert steps_awake(ledger, 4, -0.4) == [True, True, True, False]
    assert sum(steps_awake(ledger, 10_000, -0.4)) < 60  # while eight small losses are needed to be sure


def test_a_model_that_wins_again_is_back() -> None:
    ledger = Ledger()
    steps_awake(ledger, 3000, -1e-3)
    assert all(steps_awake(ledger, 2000, 1e-3)[1100:])


def test_a_model_that_is_never_used_rests_too() -> None:
    awake = steps_awake(Ledger(), 10_000, None)
    assert all(awake[:64])
    assert sum(awake) < 0.1 * len(awake)


def test_kinds_of_use_do_not_share_their_losses() -> None:
    ledger = Ledger()
    for _ in range(20):
        ledger.step()
        ledger.enter("under load", -1e-3)
        ledger.enter("alone", 1e-3)
    assert ledger.rests("under load")
    assert not ledger.rests("alone")


def test_what_was_asked_for_by_name_is_tried_and_paid_for_later() -> None:
    trials = Trials()
    assert all(trials.may_spend(1.5, must=True) for _ in range(100))
    assert not trials.may_spend(0.1)
    for _ in range(2000):
        trials.earn()
    assert trials.may_spend(0.1)

"""Drafts that grow level by level, what their drafter's claims are worth, and when a level more stops paying."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verdraft.spec.calibration import Calibration
from verdraft.spec.eagle_costs import EagleCosts
from verdraft.spec.growing import Branch, Growing
from verdraft.spec.payback import Payback
from verdraft.spec.spending import FREE, CostTable

ENDS = frozenset({9})
PASS = CostTable((1, 8, 16, 64), (30.0, 34.0, 44.0, 98.0))
CHEAP = CostTable((1, 64), (1.0, 2.0))
DEAR = CostTable((1, 64), (50.0, 60.0))


def test_a_chain_takes_one_token_a_level() -> None:
    growing = Growing(depth=3, topk=1, limit=8, ends=ENDS)
    for token in (4, 5, 6):
        assert len(growing.frontier) == 1
        growing.branch([[Branch(token, 0.5, 0.8)]])
    assert growing.frontier == []
    draft, claims = growing.draft("eagle")
    assert (draft.tokens, draft.parents, claims) == ((4, 5, 6), (), (0.5, 0.5, 0.5))
    assert draft.probs == pytest.approx((0.8, 0.64, 0.512))


def test_nothing_grows_behind_an_end() -> None:
    growing = Growing(depth=3, topk=2, limit=8, ends=ENDS)
    growing.branch([[Branch(9, 0.9, 0.9), Branch(1, 0.1, 0.1)]])
    assert [growing.tokens[node] for node in growing.frontier] == [1]


def test_a_tree_keeps_the_likeliest_paths() -> None:
    growing = Growing(depth=2, topk=2, limit=4, ends=ENDS)
    growing.branch([[Branch(1, 0.6, 0.6), Branch(2, 0.3, 0.3)]])
    growing.branch([[Branch(3, 0.5, 0.5), Branch(4, 0.4, 0.4)], [Branch(5, 0.9, 0.9), Branch(6, 0.1, 0.1)]])
    draft, claims = growing.draft("eagle")
    assert draft.tokens == (1, 2, 3, 5)
    assert draft.parents == (-1, -1, 0, 1)
    assert claims == (0.6, 0.3, 0.5, 0.9)


@given(st.integers(0, 10**6))
def test_any_beginning_of_a_draft_is_a_tree_of_likely_paths(seed: int) -> None:
    rnd = random.Random(seed)
    growing = Growing(depth=rnd.randint(1, 5), topk=rnd.randint(2, 4), limit=rnd.randint(1, 12), ends=ENDS)
    paths = {}
    while growing.frontier:
        assert len(growing.frontier) <= growing.topk
        first = len(growing.tokens)
        growing.branch([[Branch(t, 0.5, rnd.random()) for t in range(rnd.randint(0, 4))] for _ in growing.frontier])
        paths |= {tuple(growing.path(node)): growing.probs[node] for node in range(first, len(growing.tokens))}
    draft, _ = growing.draft("eagle")
    assert len(growing.looked) <= growing.limit
    assert len(draft.tokens) == min(growing.limit, len(growing.tokens))
    assert all(parent < node for node, parent in enumerate(draft.parents))
    assert list(draft.probs) == sorted(paths.values(), reverse=True)[: growing.limit]


def test_a_claim_is_worth_what_such_claims_were_worth() -> None:
    calibration = Calibration()
    assert calibration.of(0.9) > calibration.of(0.5) > calibration.of(0.1)
    for i in range(600):
        calibration.learn(0.92, right=i % 2 == 0)
    assert calibration.of(0.93) == pytest.approx(0.5, abs=0.05)
    assert calibration.of(0.1) < 0.2
    assert 0.0 < calibration.of(0.0) < calibration.of(1.0) < 1.0


def test_drafting_takes_longer_by_levels_and_sequences() -> None:
    costs = EagleCosts(CHEAP, CHEAP, CHEAP)
    assert costs.drafting(1, 1, 1) == 2.0
    assert costs.drafting(0.5, 1, 1) == 2.0  # whoever drafts at all takes the first level
    assert costs.drafting(3, 1, 1) == 6.0
    assert costs.drafting(3, 4, 2) > costs.drafting(3, 4, 1) > costs.drafting(3, 1, 1)


def test_what_drafting_really_takes_is_learned() -> None:
    costs = EagleCosts(CHEAP, CHEAP, CHEAP)
    for _ in range(200):
        costs = costs.seen(3, 1, 1, seconds=12.0)
    assert costs.drafting(3, 1, 1) == pytest.approx(12.0, rel=0.01)
    assert costs.worth_growing([0.13], 1.0, 1, PASS) == [False]  # it was worth it at the first price
    assert EagleCosts(CHEAP, CHEAP, CHEAP).worth_growing([0.13], 1.0, 1, PASS) == [True]
    assert EagleCosts().seen(3, 1, 1, seconds=1.0) == EagleCosts()  # nothing was measured, so all is free


def test_a_payback_follows_what_drafts_bring() -> None:
    payback = Payback()
    for _ in range(60):
        payback.drafted(3)
        payback.learn(verified=2, depth=2, accepted=1)
    assert (payback.accepted, payback.verified, payback.levels) == pytest.approx((1.0, 2.0, 3.0), abs=0.05)
    assert payback.agreement.rate == pytest.approx(0.5, abs=0.05)
    assert payback.fresh().verified == payback.verified
    assert payback.fresh().num_drafts == 0


def test_a_level_more_is_for_those_that_hope() -> None:
    costs = EagleCosts(CHEAP, CHEAP, CHEAP)
    assert costs.worth_growing([0.8, 0.001], 2.0, 2, PASS) == [True, False]
    assert costs.worth_growing([0.02], 1.0, 1, PASS) == [False]
    assert EagleCosts(DEAR, DEAR, DEAR).worth_growing([0.8], 1.0, 1, PASS) == [False]
    assert EagleCosts().worth_growing([0.01], 1.0, 1, FREE) == [True]  # nothing costs anything

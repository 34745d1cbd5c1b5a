"""EAGLE drafts: the law, the drafter's own KV, and what is learned, whatever is accepted and rejected."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import HealthCheck

from verdraft.scheduler.request import Fault
from verdraft.spec.eagle_costs import EagleCosts
from verdraft.spec.spending import FREE, CostTable

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def answer_of(make_engine, drain, make_request, prompt, **fields):
    engine = make_engine(num_blocks=256, model=fields.pop("model"))
    engine.add(make_request("ref", prompt, speculation="off", **fields))
    return drain(engine)["ref"].tokens


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6))
def test_any_agreement_keeps_the_law(make_engine, drain, make_request, exiting, watch, eagle_of, caplog, seed):
    """Chains and trees beside windows of exits, suffix drafts and plain decoding, with little memory."""
    rnd = random.Random(seed)
    segments = exiting(0.8, 0.8)
    model = segments["model"]
    shared = [rnd.randrange(1, 40) for _ in range(12)]
    jobs, answers = {}, {}
    for i in range(5):
        prompt = shared[: rnd.randint(1, 12)] + [rnd.randrange(1, 40) for _ in range(rnd.randint(0, 12))]
        params = {"max_tokens": rnd.randint(1, 16), "temperature": rnd.choice([0.0, 1.0]), "seed": i}
        params |= {"repetition_penalty": rnd.choice([1.0, 1.3]), "min_tokens": rnd.choice([0, 5])}
        jobs[f"r{i}"] = (prompt, params)
        answers[f"r{i}"] = answer_of(make_engine, drain, make_request, prompt, model=model, **params)
    engine = make_engine(
        num_blocks=rnd.choice([12, 16, 64]),
        max_batch_tokens=rnd.choice([8, 9, 32]),
        max_num_seqs=4,
        shape=(rnd.randint(1, 5), rnd.choice([1, 1, 2, 3]), rnd.randint(1, 12)),
        eagle=eagle_of(model, rnd.choice([0, 0.5, 0.9, 1]), rnd.choice([12, 48])),
        **(segments if rnd.random() < 0.5 else {"model": model}),
    )
    row = CostTable((1, 32), (0.01, rnd.choice([0.02, 0.5])))
    engine.drafting.costs = rnd.choice([FREE, CostTable((1, 32), (1.0, rnd.uniform(1, 20)))])
    engine.drafting.eagle.costs = rnd.choice([EagleCosts(), EagleCosts(row, row, row)])
    watch(engine, model)
    found = {}
    for name, (prompt, params) in jobs.items():
        fault = rnd.choice([None, Fault(kind="preempt", after_tokens=rnd.randint(0, 4))])
        mode = rnd.choice(["eagle", "eagle", "suffix", "off", *engine.drafting.exits.modes])
        engine.add(make_request(name, prompt, speculation=mode, fault=fault, **params))
        for _ in range(rnd.randint(0, 6)):
            for request, piece in engine.step():
                found.setdefault(request.id, []).extend(piece.tokens)
            if rnd.random() < 0.2 and not engine._flights:
                engine.drafting.draft()  # drafts that are never verified
    for name, rest in drain(engine).items():
        found.setdefault(name, []).extend(rest.tokens)
    assert found == answers
    assert not caplog.records


@pytest.mark.parametrize("topk", [1, 3])
def test_a_head_that_is_always_right_fills_every_draft(
    make_engine, drain, make_request, hash_model, eagle_of, watch, topk
):
    model = hash_model()
    params = {"max_tokens": 26, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    params |= {"logit_bias": {7: 9.0, 8: 9.0}, "frequency_penalty": 2.0}  # every token depends on the ones before it
    expected = answer_of(make_engine, drain, make_request, PROMPT, model=model, **params)
    engine = make_engine(model=model, eagle=eagle_of(model, 1.0), shape=(4, topk, 32), max_batch_tokens=64)
    watch(engine, model)
    request = make_request("a", PROMPT, speculation="eagle", **params)
    engine.add(request)
    assert drain(engine)["a"].tokens == expected
    # Five passes of five tokens each, after the one that the prompt gave; a tree has less room in the last.
    assert request.stats.num_target_passes == 5 + (topk > 1)
    assert request.stats.sources["eagle"].num_accepted_tokens == 20 - (topk > 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_finds_what_a_chain_misses(make_engine, drain, make_request, hash_model, eagle_of, temperature):
    passes = {}
    for topk in (1, 4):
        model = hash_model()
        head = eagle_of(model, 1.0)
        blur(head)
        engine = make_engine(model=model, eagle=head, shape=(4, topk, 32), max_batch_tokens=128)
        fields = {"max_tokens": 100, "ignore_eos": True, "temperature": temperature, "seed": 1}
        request = make_request("a", PROMPT, speculation="eagle", **fields)
        engine.add(request)
        drain(engine)
        passes[topk] = request.stats.num_target_passes
    assert passes[4] < 0.8 * passes[1]


def blur(head):
    """From now on near the truth, often with another favourite."""
    right = head._row

    def row(prefix):
        rnd = random.Random(hash(prefix))
        return right(prefix) + [rnd.gauss(0, 1.5) for _ in head.token_ids]

    head._row = row


def step_until_followed(engine):
    """The only sequence, as soon as its prompt is computed."""
    while not (engine.scheduler.running and engine.scheduler.running[0].features):
        engine.step()
    return engine.scheduler.running[0]


def test_a_cached_prefix_keeps_the_drafters_view(make_engine, drain, make_request, hash_model, eagle_of):
    model = hash_model()
    engine = make_engine(model=model, eagle=eagle_of(model, 1.0))
    for name, cached in (("first", 0), ("second", 36)):
        engine.add(make_request(name, [*PROMPT * 4, 3], max_tokens=20, ignore_eos=True, speculation="eagle"))
        seq = step_until_followed(engine)
        assert (seq.cached_tokens, seq.features.first) == (cached, 0)
        drain(engine)


def test_a_prefix_that_no_drafter_saw_is_left_out(make_engine, drain, make_request, hash_model, eagle_of, caplog):
    model = hash_model()
    engine = make_engine(model=model, eagle=eagle_of(model, 1.0))
    engine.add(make_request("first", [*PROMPT * 4, 3], max_tokens=20, ignore_eos=True, speculation="off"))
    drain(engine)
    request = make_request("second", [*PROMPT * 4, 3], max_tokens=21, ignore_eos=True, speculation="eagle")
    engine.add(request)
    assert step_until_followed(engine).features.first == 36
    drain(engine)
    assert request.stats.sources["eagle"].num_accepted_tokens == 16
    assert not caplog.records


def test_a_long_prompt_does_not_pile_up(make_engine, drain, make_request, hash_model, eagle_of, monkeypatch, caplog):
    monkeypatch.setattr("verdraft.scheduler.eagle.MOST_WAITING", 10)
    model = hash_model()
    engine = make_engine(model=model, eagle=eagle_of(model, 1.0), max_batch_tokens=8)
    request = make_request("a", PROMPT * 8, max_tokens=21, ignore_eos=True, speculation="eagle")
    engine.add(request)
    while engine.has_work:
        engine.step()
        followed = [seq.features for seq in engine.scheduler.running if seq.features]
        assert all(features.end - features.computed <= 10 for features in followed)
        assert all(features.first >= features.end - 40 for features in followed)
    assert request.stats.sources["eagle"].num_accepted_tokens == 16
    assert not caplog.records


@pytest.mark.parametrize("broken", ["fuse", "forward", "logits"])
def test_a_failing_head_costs_no_request_anything(make_engine, drain, make_request, hash_model, eagle_of, broken):
    model = hash_model()
    expected = answer_of(make_engine, drain, make_request, PROMPT, model=model, max_tokens=20, ignore_eos=True)
    head = eagle_of(model, 1.0)
    setattr(head, broken, lambda *_: 1 / 0)
    engine = make_engine(model=model, eagle=head)
    engine.add(make_request("a", PROMPT, max_tokens=20, ignore_eos=True, speculation="eagle"))
    found = drain(engine)["a"]
    assert (found.tokens, found.finish) == (expected, "length")


def test_features_that_cannot_be_kept_cost_no_request_anything(make_engine, drain, make_request, hash_model, eagle_of):
    model = hash_model()
    expected = answer_of(make_engine, drain, make_request, PROMPT, model=model, max_tokens=20, ignore_eos=True)
    engine = make_engine(model=model, eagle=eagle_of(model, 1.0))
    engine.drafting.eagle._grower.seen.reach = lambda *_: 1 / 0
    engine.add(make_request("a", PROMPT, max_tokens=20, ignore_eos=True, speculation="eagle"))
    found = drain(engine)["a"]
    assert (found.tokens, found.finish) == (expected, "length")


@pytest.mark.parametrize("kind", ["raise", "nan"])
def test_a_fault_beside_a_draft_stays_its_own(make_engine, drain, make_request, hash_model, eagle_of, kind):
    model = hash_model()
    fields = {"max_tokens": 20, "ignore_eos": True}
    expected = answer_of(make_engine, drain, make_request, PROMPT, model=model, **fields)
    engine = make_engine(model=model, eagle=eagle_of(model, 0.8), shape=(4, 2, 32))
    fault = Fault(kind=kind, after_tokens=5)
    engine.add(make_request("bad", PROMPT, speculation="eagle", fault=fault, **fields))
    engine.add(make_request("good", PROMPT, speculation="eagle", **fields))
    found = drain(engine)
    assert found["good"].tokens == expected
    assert found["bad"].finish == "error"
    assert found["bad"].tokens == expected[: len(found["bad"].tokens)]


def test_a_head_that_is_never_right_is_asked_less_and_less(make_engine, drain, make_request, hash_model, eagle_of):
    model = hash_model()
    engine = make_engine(model=model, eagle=eagle_of(model, 0.0))
    full, part = CostTable((1, 32), (1.0, 2.0)), CostTable((1, 32), (0.1, 0.1))
    engine.drafting.costs, engine.drafting.eagle.costs = full, EagleCosts(part, part, part)
    request = make_request("a", PROMPT, max_tokens=240, ignore_eos=True, speculation="eagle")
    engine.add(request)
    drain(engine)
    assert 20 <= request.stats.sources["eagle"].num_draft_tokens < 60 < request.stats.num_target_passes


def test_what_claims_are_worth_is_learned(make_engine, drain, make_request, hash_model, eagle_of):
    """A head that is always right but claims next to nothing is soon believed."""
    model = hash_model()
    head = eagle_of(model, 1.0)
    logits = head.logits
    head.logits = lambda hidden: 0.01 * logits(hidden)  # every token is as likely
    engine = make_engine(model=model, eagle=head)
    full, part = CostTable((1, 32), (1.0, 8.0)), CostTable((1, 32), (0.01, 0.01))
    engine.drafting.costs, engine.drafting.eagle.costs = full, EagleCosts(part, part, part)
    request = make_request("a", PROMPT, max_tokens=240, ignore_eos=True, speculation="eagle")
    engine.add(request)
    drain(engine)
    assert request.stats.num_target_passes < 160


@pytest.mark.parametrize("prefills", [False, True])
def test_no_draft_takes_what_others_owe(make_engine, drain, make_request, hash_model, eagle_of, prefills):
    """Trees larger than a sequence's share of a step once left nothing to those of lower rank, nor to new prompts."""
    model = hash_model()
    engine = make_engine(model=model, eagle=eagle_of(model, 1.0), shape=(4, 3, 30), max_batch_tokens=16, num_blocks=256)
    for name in "abcd":
        engine.add(make_request(name, PROMPT, max_tokens=60, ignore_eos=True, speculation="eagle"))
    for _ in range(5):
        engine.step()
    if prefills:
        engine.add(make_request("new", PROMPT[::-1], max_tokens=1, speculation="off"))
    for _ in range(3):
        served = {request.id for request, _ in engine.step()}
        assert served >= {"a", "b", "c", "d"}
        prefills = prefills and "new" not in served
    assert not prefills


@pytest.mark.parametrize("make_engine", ["host"], indirect=True)  # whose steps always draft
@pytest.mark.parametrize("agreement", [0.0, 1.0])
def test_a_sequence_is_followed_only_while_its_head_may_pay(
    make_engine, drain, make_request, hash_model, eagle_of, agreement
):
    model = hash_model()
    params = {"max_tokens": 240, "ignore_eos": True}
    expected = answer_of(make_engine, drain, make_request, PROMPT, model=model, **params)
    engine = make_engine(model=model, eagle=eagle_of(model, agreement))
    full, part = CostTable((1, 32), (1.0, 2.0)), CostTable((1, 32), (0.1, 0.1))
    engine.drafting.costs, engine.drafting.eagle.costs = full, EagleCosts(part, part, part)
    engine.add(make_request("a", PROMPT, speculation="hybrid", **params))
    tokens, followed = [], []
    while engine.has_work:
        tokens += [token for _, piece in engine.step() for token in piece.tokens]
        followed += [seq.is_followed for seq in engine.scheduler.running]
    assert tokens == expected
    if agreement:
        assert all(followed)
    else:
        assert 0.2 < sum(followed) / len(followed) < 0.8
        assert True in followed[followed.index(False) :]  # things may have changed

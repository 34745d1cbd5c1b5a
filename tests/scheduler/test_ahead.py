"""Passes that are begun before the one before them has ended: what they take of it, and what becomes of them."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import HealthCheck

from verdraft.scheduler.device import HostDevice
from verdraft.scheduler.request import Fault
from verdraft.spec.patience import Patience
from verdraft.spec.spending import CostTable

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]

late = pytest.mark.parametrize("make_engine", ["late"], indirect=True)
how = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
some = settings(how, max_examples=settings.default.max_examples // 4)


def answer_of(make_engine, drain, make_request, prompt, **fields):
    """The tokens of such a request alone, in passes of which each is waited for."""
    engine = make_engine(device=HostDevice())
    engine.add(make_request("alone", prompt, speculation="off", **fields))
    return drain(engine)["alone"].tokens


def batch_of(make_engine, make_request, count, **fields):
    engine = make_engine(num_blocks=256)
    for i in range(count):
        engine.add(make_request(str(i), [*PROMPT, i], speculation="off", ignore_eos=True, seed=i, **fields))
    return engine


@late
@pytest.mark.parametrize("top", [None, 1])
def test_without_drafts_no_pass_waits_for_the_host(make_engine, drain, make_request, top):
    engine = batch_of(make_engine, make_request, 5, max_tokens=12, temperature=1.0, prompt_logprobs=top)
    found = drain(engine)
    assert engine._device.ahead == engine._device.begun - 1 > 11
    for i in range(5):
        fields = {"max_tokens": 12, "temperature": 1.0, "seed": i, "ignore_eos": True}
        assert found[str(i)].tokens == answer_of(make_engine, drain, make_request, [*PROMPT, i], **fields)


@late
def test_what_ends_at_its_length_is_in_no_pass_behind(make_engine, drain, make_request):
    host, ahead = [make_engine(num_blocks=256, device=device) for device in (HostDevice(), None)]
    for engine in (host, ahead):
        for i in range(4):
            request = make_request(str(i), [*PROMPT, i], speculation="off", ignore_eos=True, max_tokens=3 + 2 * i)
            engine.add(request)
        drain(engine)
    assert ahead._device.ahead > 5
    assert ahead.counters().iteration_tokens == host.counters().iteration_tokens


@late
@pytest.mark.parametrize("fields", [{"repetition_penalty": 1.2}, {"prediction": (1, 2, 3)}])
def test_passes_wait_where_one_request_needs_to_know_the_tokens(make_engine, drain, make_request, fields):
    engine = batch_of(make_engine, make_request, 2, max_tokens=40)
    for _ in range(4):
        engine.step()
    before = engine._device.ahead
    assert before > 0
    fields = {"speculation": "auto", "ignore_eos": True, "max_tokens": 8} | fields
    engine.add(make_request("b", PROMPT, **fields))
    for _ in range(3):
        engine.step()
    there, since = [seq.request.id for seq in engine.scheduler.running], engine._device.ahead
    assert "b" in there
    for _ in range(3):
        engine.step()
    assert engine._device.ahead == since
    drain(engine)
    assert engine._device.ahead > since


@late
def test_choices_find_the_prefix_of_the_first_one(make_engine, drain, make_request):
    hits = []
    for device in (HostDevice(), None):
        engine = make_engine(num_blocks=256, device=device)
        requests = [make_request(f"c{i}", PROMPT * 5, speculation="off", max_tokens=6, choice=i) for i in range(3)]
        for request in requests:
            engine.add(request, requests[0] if request.choice else None)
        drain(engine)
        hits.append(engine.counters().prefix_cache_hits)
    assert hits[0] == hits[1] > 0


@late
def test_nan_that_the_pass_ahead_has_taken_stays_with_its_request(make_engine, drain, make_request, hash_model):
    fields = {"max_tokens": 12, "ignore_eos": True}
    prompts = {name: [*PROMPT, i] for i, name in enumerate("abc")}
    answers = {name: answer_of(make_engine, drain, make_request, prompt, **fields) for name, prompt in prompts.items()}

    class Ill(hash_model):
        def logits(self, hidden):
            rows = super().logits(hidden)
            for row, value in zip(rows, hidden[:, 0].tolist(), strict=True):
                if self.prefixes[value][: len(PROMPT) + 4] == (*prompts["b"], *answers["b"][:3]):
                    row.fill_(torch.nan)
            return rows

    engine = make_engine(num_blocks=64, model=Ill())
    for name, prompt in prompts.items():
        engine.add(make_request(name, prompt, speculation="off", **fields))
    found = drain(engine)
    assert engine._device.ahead > 5
    assert found["b"].finish == "error"
    assert found["b"].tokens == answers["b"][:3]
    assert [found[name].tokens for name in "ac"] == [answers[name] for name in "ac"]


@late
def test_a_pass_ahead_of_one_that_fails_counts_for_nothing(make_engine, drain, make_request, hash_model):
    fields = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 4}
    expected = [answer_of(make_engine, drain, make_request, [*PROMPT, i], **fields) for i in range(3)]
    for ill_at in range(1, 12):
        model, left = hash_model(), [ill_at]

        def fail_once(left=left):
            left[0] -= 1
            if left[0] == 0:
                raise RuntimeError("the device is ill for a moment")

        model.before_forward = fail_once
        engine = make_engine(model=model)
        for i in range(3):
            engine.add(make_request(str(i), [*PROMPT, i], speculation="off", **fields))
        found = drain(engine)
        assert [found[str(i)].tokens for i in range(3)] == expected
        assert left[0] < 0


@late
@some
@given(st.integers(0, 10**6))
def test_any_traffic_gets_what_each_request_gets_alone(
    make_engine, drain, make_request, hash_model, watch, fickle_patience, seed
):
    """Arrivals, ends of every kind, people who leave, faults, pools that preempt, and requests that draft."""
    rnd, model = random.Random(seed), hash_model()
    engine = make_engine(
        model=model,
        num_blocks=rnd.choice([11, 14, 64]),
        max_batch_tokens=rnd.choice([8, 9, 32]),
        max_num_seqs=rnd.choice([2, 4]),
    )
    watch(engine, model)
    engine.drafting.costs = CostTable((1, 32), (1.0, 1.2))
    engine._lookahead._patience = fickle_patience(rnd)
    requests, found, left = {}, {}, set()
    for i in range(8):
        prompt = [rnd.randrange(1, 40) for _ in range(rnd.randint(1, 20))]
        fields = {"max_tokens": rnd.randint(1, 16), "temperature": rnd.choice([0.0, 1.0]), "seed": i}
        extras = [{}, {"top_k": 5}, {"min_tokens": 6}, {"logit_bias": {3: 4.0}}, {"presence_penalty": 1.0}]
        fields |= rnd.choice(extras)
        faults = [Fault(kind=kind, after_tokens=rnd.randint(0, 4)) for kind in ("preempt", "nan")]
        fault = rnd.choice([None] * 4 + faults)
        expected = answer_of(make_engine, drain, make_request, prompt, **fields)
        mode = rnd.choice(["off"] * 3 + ["hybrid"] * 2 + ["suffix"])
        request = make_request(f"r{i}", prompt, speculation=mode, fault=fault, **fields)
        requests[request.id], found[request.id] = (request, expected), []
        engine.add(request)
        for _ in range(rnd.randint(0, 6)):
            if rnd.random() < 0.05:
                left.add(request.id)
                engine.abort(request)
            for other, piece in engine.step():
                found[other.id] += piece.tokens
            engine.check_integrity()
    for name, rest in drain(engine).items():
        found[name] += rest.tokens
    for name, (request, expected) in requests.items():
        if name in left or (request.fault and request.fault.kind == "nan"):
            assert found[name] == expected[: len(found[name])]
        else:
            assert found[name] == expected


@late
def test_nothing_is_begun_behind_a_pass_that_could_not_begin(make_engine, drain, make_request, hash_model, late_device):
    """A GPU may be short of memory when it is told of a pass. What the next one would take of it, nobody will find, and
    to look up an embedding that is none costs a GPU all that it holds."""
    tokens = []

    class Watched(hash_model):
        def embed(self, taken, positions):
            tokens.extend(taken.tolist())
            return super().embed(taken, positions)

    class Short(late_device):
        def start(self, work):
            if self.begun == 4 and not tokens.count(-2):
                tokens.append(-2)
                raise torch.OutOfMemoryError("for a moment")
            return super().start(work)

    engine = make_engine(model=Watched(), device=Short())
    fields = {"max_tokens": 12, "ignore_eos": True}
    for i in range(3):
        engine.add(make_request(str(i), [*PROMPT, i], speculation="off", **fields))
    found = drain(engine)
    for i in range(3):
        assert found[str(i)].tokens == answer_of(make_engine, drain, make_request, [*PROMPT, i], **fields)
    assert -2 in tokens
    assert -1 not in tokens


@late
def test_time_without_work_is_no_time_of_any_pass(make_engine, drain, make_request):
    """A request that stops by itself leaves a pass behind that was begun ahead; it ends in the next request's first
    step, however much later that comes."""
    learned = []

    class Listening(Patience):
        def learn(self, load, waited, tokens, now):
            learned.append(tokens)
            super().learn(load, waited, tokens, now)

    engine = make_engine()
    engine._lookahead._patience = Listening()
    fields = {"max_tokens": 12, "ignore_eos": True, "speculation": "off"}
    ending = answer_of(make_engine, drain, make_request, PROMPT, max_tokens=4, ignore_eos=True)[-1]
    for i in range(2):
        engine.add(make_request(str(i), PROMPT, stop_token_ids=frozenset({ending}), **fields))
        drain(engine)
        assert engine._flights
    assert engine._device.ahead > 4
    assert learned
    assert 0 not in learned

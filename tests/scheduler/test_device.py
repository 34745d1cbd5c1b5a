"""Passes that are under way between two steps: what is staged for them, who leaves meanwhile, what fails late."""

import random
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
import torch

from verdraft.scheduler.device import HostDevice, pack
from verdraft.spec.constraint import Mask, Unconstrained

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


late = pytest.mark.parametrize("make_engine", ["late"], indirect=True)


def test_arrays_come_out_of_one_buffer_as_they_went_in():
    arrays = [
        np.arange(5, dtype=np.int32),
        np.empty((0, 3), np.int64),
        np.arange(6, dtype=np.int64).reshape(2, 3)[:, ::2],
        np.array([0.5, -1e300]),
        np.empty(0, np.int32),
    ]
    packed, parts = pack(arrays, pinned=False)
    found = parts.of(packed.clone())
    for tensor, array in zip(found, arrays, strict=True):
        assert tensor.dtype == torch.from_numpy(np.zeros(1, array.dtype)).dtype
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.shape == array.shape


@late
def test_a_request_that_ends_while_its_pass_is_under_way_gets_nothing_more(make_engine, drain, make_request):
    expected = {}
    for name in ("stays", "comes"):
        alone = make_engine()
        alone.add(make_request(name, [*PROMPT, len(name)], max_tokens=12, ignore_eos=True))
        expected[name] = drain(alone)[name].tokens
    engine = make_engine(num_blocks=8)
    leaving = make_request("leaves", PROMPT, max_tokens=12, ignore_eos=True)
    engine.add(leaving)
    engine.add(make_request("stays", [*PROMPT, 5], max_tokens=12, ignore_eos=True))
    found = {"stays": [], "comes": [], "leaves": []}
    for step in range(100):
        if step == 3:
            ((_, piece),) = engine.abort(leaving)
            assert piece.finish == "abort"
            engine.add(make_request("comes", [*PROMPT, 5], max_tokens=12, ignore_eos=True))
        for request, piece in engine.step():
            assert step < 3 or request is not leaving
            found[request.id] += piece.tokens
        engine.check_integrity()
    assert not engine.has_work
    assert {name: found[name] for name in expected} == expected
    assert engine.counters().kv_blocks_used == 0


@late
def test_a_pass_that_fails_when_it_is_waited_for_costs_no_neighbour_anything(
    make_engine, drain, make_request, hash_model
):
    model = hash_model()
    expected = {}
    for name in ("a", "b"):
        engine = make_engine(model=model)
        engine.add(make_request(name, [*PROMPT, ord(name) % 48], max_tokens=9, ignore_eos=True))
        expected[name] = drain(engine)[name].tokens
    left = [3]

    def fail_once() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("the device is ill for a moment")

    model.before_forward = fail_once
    engine = make_engine(model=model)
    for name in expected:
        engine.add(make_request(name, [*PROMPT, ord(name) % 48], max_tokens=9, ignore_eos=True))
    found = drain(engine)
    assert left[0] < 0
    assert {name: found[name].tokens for name in expected} == expected


@late
def test_what_was_committed_is_told_even_if_the_next_plan_fails(make_engine, make_request):
    engine = make_engine()
    request = make_request("a", PROMPT, max_tokens=1, ignore_eos=True)
    engine.add(request)
    engine.step()

    def fail() -> None:
        raise RuntimeError("no draft today")

    engine.drafting.draft = engine.drafting.skip = fail
    with pytest.raises(RuntimeError, match="no draft today"):
        engine.step()
    ((told, piece),) = engine.fail_all()
    assert told is request
    assert (len(piece.tokens), piece.finish) == (1, "length")


@late
def test_a_pass_that_came_but_is_worth_nothing_gives_no_tokens(make_engine, drain, make_request, hash_model):
    """When a process that computes beside this one dies, a GPU answers all the same: with anything."""
    model, left = hash_model(), [4]

    def check() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("the other processes ended")

    engine = make_engine(model=model)
    engine.add(make_request("a", PROMPT, max_tokens=9, ignore_eos=True))
    expected = drain(engine)["a"].tokens
    model.check = check
    engine = make_engine(model=model)
    engine.add(make_request("a", PROMPT, max_tokens=9, ignore_eos=True))
    found = drain(engine)["a"]
    assert found.finish == "error"
    assert found.tokens == expected[:4]


def check_logprobs(told: Any, known: Any) -> None:
    """Those of the device and of the host, with whom it may differ by a rounding of sums."""
    check_scores(*([one for piece in answer.slices for one in piece.logprobs] for answer in (told, known)))


def check_scores(told: Any, known: Any) -> None:
    for a, b in zip(told, known, strict=True):
        assert [token for token, _ in a.top] == [token for token, _ in b.top]
        assert [value for _, value in a.top] == pytest.approx([value for _, value in b.top], abs=1e-9)
        assert a.logprob == pytest.approx(b.logprob, abs=1e-9)


@late
@pytest.mark.parametrize("drafted", [False, True])
def test_logprobs_are_those_that_the_host_finds(make_engine, drain, make_request, late_device, drafted):
    """Of requests that want some, and of their neighbours that do not, in whatever order they came."""
    tops = [None, 3, 0, None, 20, 100]

    def answers(engine, predictions):
        for i, top in enumerate(tops):
            fields = {"temperature": 0.9, "seed": i, "top_p": 0.9} if i == 2 else {}
            prediction = predictions.get(str(i), ()) if drafted else ()
            mode = "auto" if drafted else "off"
            engine.add(
                make_request(
                    str(i), [*PROMPT, i], max_tokens=12, ignore_eos=True, logprobs=top,
                    speculation=mode, prediction=prediction, **fields,
                )
            )  # fmt: skip
        return drain(engine)

    expected = answers(make_engine(device=HostDevice()), {})
    device = late_device()
    engine = make_engine(device=device)
    found = answers(engine, {name: one.tokens for name, one in expected.items()})
    assert device.asked == 0
    assert (engine.counters().spec["prediction"].num_accepted_tokens > 20) is drafted
    for i, top in enumerate(tops):
        told, known = found[str(i)], expected[str(i)]
        assert told.tokens == known.tokens
        assert sum(len(piece.logprobs) for piece in told.slices) == (0 if top is None else 12)
        check_logprobs(told, known)


def told_of(engine: Any, drain: Any, make_request: Any, prompts: dict[str, list[int]], tops: dict[str, Any]) -> Any:
    """Answers to these prompts with so many log-probabilities, some of the outputs' too, one with a penalty."""
    for name, prompt in prompts.items():
        fields = {"temperature": 0.8, "seed": 1, "repetition_penalty": 1.2} if name == "b" else {}
        wanted = {"max_tokens": 0 if name == "d" else 6, "logprobs": 5 if name in "ab" else None}
        request = make_request(name, prompt, ignore_eos=True, prompt_logprobs=tops[name], **wanted, **fields)
        engine.add(request)
    return drain(engine)


@late
@pytest.mark.parametrize("mode", ["off", "suffix"])
def test_prompt_logprobs_are_those_that_the_host_finds(make_engine, drain, make_request, late_device, mode):
    """However prompts are cut, and whoever computes beside them; bit for bit the same however that is."""
    rng = random.Random(0)
    sizes = {"a": 200, "b": 9, "c": 1, "d": 31, "e": 40}
    prompts = {name: [rng.randrange(1, 48) for _ in range(size)] for name, size in sizes.items()} | {"f": PROMPT * 5}
    tops = {"a": 2, "b": 0, "c": 1, "d": 100, "e": None, "f": 1}

    def answers(device, chunk):
        engine = make_engine(device=device, max_batch_tokens=chunk, num_blocks=128, max_model_len=512)

        def make(name, prompt, **fields):
            return make_request(name, prompt, speculation=mode, **fields)

        return told_of(engine, drain, make, prompts, tops)

    def prompt_logprobs(answer):
        return [one for piece in answer.slices for one in piece.prompt_logprobs]

    expected, before = answers(HostDevice(), 512), None
    for chunk in (512, 64, 7):
        device = late_device()
        found = answers(device, chunk)
        assert device.asked == 0
        told = {name: prompt_logprobs(found[name]) for name in prompts}
        for name, prompt in prompts.items():
            assert found[name].tokens == expected[name].tokens
            assert len(told[name]) == (0 if tops[name] is None else len(prompt) - 1)
            check_scores(told[name], prompt_logprobs(expected[name]))
            check_logprobs(found[name], expected[name])
        assert before in (None, told)
        before = told


class Forbids(Unconstrained):
    """Some tokens."""

    def __init__(self, tokens: Collection[int]) -> None:
        self.tokens = tokens

    def allows(self, token: int) -> bool:
        return token not in self.tokens

    def mask(self) -> Mask:
        return np.array([self.allows(token) for token in range(48)])


@late
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 1, "top_p": 0.97, "frequency_penalty": 0.2}]
)
def test_only_rows_whose_token_a_grammar_may_change_come_to_the_host(
    make_engine, drain, make_request, late_device, scripted, fields, drafted
):
    def answer(device, tokens, draft=()):
        factory = {"drafter_factory": lambda _: scripted(draft, 0.0, 0)} if drafted and draft else {}
        engine = make_engine(device=device, **factory)
        wanted = {"max_tokens": 24, "ignore_eos": True, "logprobs": 2}
        engine.add(make_request("a", PROMPT, constraint=Forbids(tokens), **wanted, **fields))
        return drain(engine)["a"]

    class Counted(late_device):
        fetched = 0

        def fetch(self, tensors):
            self.fetched += len(tensors)
            return super().fetch(tensors)

    free, device = answer(HostDevice(), ()), Counted()
    check_logprobs(answer(device, (), free.tokens), free)
    assert device.fetched <= (8 if "top_p" in fields else 0)
    bound, device = answer(HostDevice(), set(free.tokens[3:6])), Counted()
    found = answer(device, set(free.tokens[3:6]), bound.tokens)
    assert found.tokens == bound.tokens
    assert found.tokens != free.tokens
    assert 0 < device.fetched < 20
    assert device.asked == 0
    check_logprobs(found, bound)


@late
def test_kernels_of_every_kind_are_compiled_before_the_first_request(make_engine, late_device):
    device, kinds = late_device(), set()
    find = device.sampler

    def sampler(logits, draws, token_ids=None, margins=None):
        kinds.add((logits.dtype, draws.limits is None))
        return find(logits, draws, token_ids, margins)

    device.sampler = sampler
    make_engine(device=device).measure()
    assert kinds == {(dtype, free) for dtype in (torch.float32, torch.float64) for free in (True, False)}

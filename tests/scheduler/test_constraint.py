"""Requests with a grammar over the hash model: the law, the end of the grammar, and grammars that leave nothing."""

import json
import random

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import HealthCheck

from verdraft.scheduler.request import Fault
from verdraft.spec.constraint import Unconstrained

SCHEMAS = (
    {
        "type": "object",
        "properties": {"tab": {"enum": ["abc", "ab"]}, "ren": {"type": "integer", "maximum": 999, "minimum": -999}},
        "required": ["tab", "ren"],
    },
    {"type": "array", "items": {"enum": ["ab", 12, None, True]}, "minItems": 1, "maxItems": 3},
    {"type": "string", "maxLength": 4},
)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def serve(engine, drain, requests):
    for request in requests:
        engine.add(request)
    return drain(engine, requests)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6))
def test_any_mix_keeps_the_law(make_engine, drain, make_request, scripted, json_vocabulary, seed):
    """Alone without drafts, and all together with drafts that lie, in pools that preempt."""
    rnd = random.Random(seed)

    def request(i, speculation):
        schema, greedy = SCHEMAS[i % 3], (i + seed) % 2
        return make_request(
            f"r{i}",
            PROMPT[: 3 + i],
            constraint=json_vocabulary.constraint(schema),
            speculation=speculation,
            temperature=0.0 if greedy else 1.0,
            top_p=0.9 if i == 4 else 1.0,
            repetition_penalty=1.2 if i == 3 else 1.0,
            min_tokens=(i * seed) % 9,
            ignore_eos=i == 2,
            seed=seed,
            max_tokens=30,
        )

    alone = [serve(make_engine(num_blocks=256), drain, [request(i, "off")])[f"r{i}"] for i in range(6)]
    for i, one in enumerate(alone):
        if one.finish == "stop":
            jsonschema.validate(json.loads(json_vocabulary.text(one.tokens)), SCHEMAS[i % 3])

    def drafter(asked):
        too_far = [rnd.randrange(48) for _ in range(4)]
        return scripted([*alone[int(asked.id[1:])].tokens, *too_far], wrong=rnd.random() * 0.5, seed=seed)

    for factory in (None, drafter):
        engine = make_engine(num_blocks=rnd.choice([11, 64]), drafter_factory=factory)
        found = serve(engine, drain, [request(i, "suffix") for i in range(6)])
        assert [(found[f"r{i}"].tokens, found[f"r{i}"].finish) for i in range(6)] == [
            (one.tokens, one.finish) for one in alone
        ]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 20])
def test_the_end_of_the_grammar_ends_the_sequence(
    make_engine, drain, make_request, json_vocabulary, ignore_eos, min_tokens
):
    """With the very token that completes it, whatever else asks for more; what it forces is drafted."""
    request = make_request(
        "a",
        PROMPT,
        constraint=json_vocabulary.constraint({"const": "abc12 tab"}),
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
        max_tokens=30,
    )
    found = serve(make_engine(), drain, [request])["a"]
    assert json_vocabulary.text(found.tokens) == '"abc12 tab"'
    assert found.finish == "stop"
    stats = request.stats.sources["grammar"]
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


def test_a_number_ends_with_the_end_token_even_when_that_is_ignored(make_engine, drain, make_request, json_vocabulary):
    """After 120 nothing but the end may come, and the grammar cannot tell before it looks."""
    schema = {"type": "integer", "minimum": 120, "maximum": 120}
    for fields in ({"ignore_eos": True}, {"min_tokens": 9}, {}):
        request = make_request("a", PROMPT, constraint=json_vocabulary.constraint(schema), max_tokens=30, **fields)
        found = serve(make_engine(), drain, [request])["a"]
        assert json_vocabulary.text(found.tokens) == "120"
        assert found.finish == "stop"


def test_a_preempted_request_goes_on_where_its_grammar_was(make_engine, drain, make_request, json_vocabulary):
    def request(fault=None):
        return make_request(
            "a", PROMPT, constraint=json_vocabulary.constraint(SCHEMAS[0]), fault=fault, seed=4, temperature=1.0
        )

    plain = serve(make_engine(), drain, [request()])["a"]
    engine = make_engine()
    assert serve(engine, drain, [request(Fault("preempt", 3))])["a"].tokens == plain.tokens
    assert engine.counters().num_preemptions == 1


class Nothing(Unconstrained):
    """Leaves no token after the third."""

    def __init__(self):
        self.num_tokens = 0

    def allows(self, token):
        return self.num_tokens < 3

    def mask(self):
        return np.full(48, self.num_tokens < 3)

    def push(self, token):
        self.num_tokens += 1

    def pop(self):
        self.num_tokens -= 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_when_nothing_is_left_that_request_ends_with_an_error(make_engine, drain, make_request, temperature):
    def neighbour():
        return make_request("b", PROMPT[::-1], max_tokens=12, ignore_eos=True)

    plain = serve(make_engine(), drain, [neighbour()])["b"]
    stuck = make_request("a", PROMPT, constraint=Nothing(), temperature=temperature, ignore_eos=True)
    found = serve(make_engine(), drain, [stuck, neighbour()])
    assert (len(found["a"].tokens), found["a"].finish) == (3, "error")
    assert found["a"].slices[-1].error_code == "invalid_value"
    assert found["b"].tokens == plain.tokens


class EndsAtThree:
    """A stop string that is complete with the third token."""

    def __init__(self):
        self.num_tokens = 0

    def push(self, token):
        self.num_tokens += 1
        return self.num_tokens == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nobody_minds_that_nothing_is_left_behind_the_end(make_engine, drain, make_request, scripted, temperature):
    """A draft that went further than a stop string once met the error that plain decoding never comes to."""

    def request():
        fields = {"temperature": temperature, "seed": 1, "logprobs": 1}
        return make_request("a", PROMPT, constraint=Nothing(), stop=EndsAtThree(), **fields)

    plain = serve(make_engine(), drain, [request()])["a"]
    assert (len(plain.tokens), plain.finish) == (3, "stop")
    for seed in range(4):
        engine = make_engine(drafter_factory=lambda _, seed=seed: scripted([*plain.tokens, 1, 2], 0.0, seed))
        found = serve(engine, drain, [request()])["a"]
        assert (found.tokens, found.finish) == (plain.tokens, "stop")
        assert sum(len(piece.logprobs) for piece in found.slices) == 3

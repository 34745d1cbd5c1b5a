"""The grammar constraint: one answer to "what may come next", whoever asks how, and nothing left behind by trying."""

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from verdraft.spec.constraint import ConstraintFailed
from verdraft.spec.draft import EMPTY, Draft
from verdraft.spec.grammar import GrammarConstraint, GrammarDrafter
from verdraft.spec.sources import ChainOfSources, MostPromising

SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}, "tab": {"enum": ["abc", "ab"]}}, "required": ["tab"]},
    {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3},
    {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 120}, {"type": "boolean"}, {"const": "nuts"}]},
    {"type": "object", "additionalProperties": {"type": "number"}},
)


def walk(constraint: GrammarConstraint, rnd: random.Random, steps: int) -> list[int]:
    """Push random allowed tokens until the end."""
    tokens: list[int] = []
    while not constraint.ended and len(tokens) < steps:
        mask = constraint.mask()
        assert mask is not None
        tokens.append(int(rnd.choice(np.flatnonzero(mask).tolist())))
        constraint.push(tokens[-1])
    return tokens


def replayed(constraint: GrammarConstraint, tokens: Sequence[int]) -> GrammarConstraint:
    """A fresh constraint that was asked nothing on its way."""
    for token in tokens:
        constraint.push(token)
    return constraint


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SCHEMAS), st.integers(0, 10**6))
def test_masks_allow_what_allows_says_wherever_the_sequence_is(json_vocabulary, schema, seed):
    """And trying tokens, asking for forced ones or being asked twice changes nothing."""
    rnd, pushed = random.Random(seed), []
    constraint = json_vocabulary.constraint(schema)
    while not constraint.ended and len(pushed) < 12:
        mask = constraint.mask()
        assert [constraint.allows(token) for token in range(48)] == mask.tolist()
        tried = walk(constraint, rnd, rnd.randint(0, 6))
        for _ in tried:
            constraint.pop()
        assert not constraint.ended
        assert constraint.num_allowed(tried) == len(tried)
        assert constraint.num_allowed([*tried[:1], 47]) == min(1, len(tried))
        forced = constraint.forced()
        assert not forced or np.flatnonzero(mask).tolist() == [forced[0]]
        assert (constraint.mask() == mask).all()
        assert (replayed(json_vocabulary.constraint(schema), pushed).mask() == mask).all()
        pushed.append(int(rnd.choice(np.flatnonzero(mask).tolist())))
        constraint.push(pushed[-1])
        assert replayed(json_vocabulary.constraint(schema), pushed).ended == constraint.ended
    if constraint.ended:
        assert constraint.mask() is None
        assert constraint.allows(5)
        assert constraint.num_allowed([0]) == 0
        assert not constraint.forced()
        constraint.push(5)
        constraint.pop()
        assert constraint.ended
        constraint.pop()
        assert not constraint.ended


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SCHEMAS), st.integers(0, 10**6))
def test_what_ends_is_json(json_vocabulary, schema, seed):
    constraint = json_vocabulary.constraint(schema)
    tokens = walk(constraint, random.Random(seed), 200)
    text = json_vocabulary.text(tokens)
    assert not constraint.ended or json.dumps(json.loads(text)), text  # loads() raises for what is not JSON


NESTED: dict[str, Any] = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}


def outcome(constraint: GrammarConstraint) -> list[bool]:
    """The mask; empty where the grammar fails."""
    try:
        mask = constraint.mask()
    except ConstraintFailed:
        return []
    assert mask is not None
    return [*map(bool, mask)]


def test_a_failure_is_forgotten_with_the_token_that_brought_it(json_vocabulary):
    """A draft that went further than a stop string once failed a sequence that had ended well without it."""
    constraint = json_vocabulary.constraint(NESTED, max_lexer_states=30)
    masks = []
    for token in json_vocabulary("[[1,2],[3,4]]"):
        masks.append(outcome(constraint))
        constraint.push(token)
        if not masks[-1]:
            break
    assert len(masks) > 1
    assert not outcome(constraint)
    for mask in reversed(masks):
        constraint.pop()
        assert outcome(constraint) == mask


def test_what_is_forced_is_drafted_and_nothing_else_is_allowed(json_vocabulary):
    constraint = json_vocabulary.constraint({"const": "abc12"})
    drafter = GrammarDrafter(constraint)
    draft = drafter.propose(16)
    assert json_vocabulary.text(draft.tokens) == '"abc12"'
    assert draft.source == "grammar"
    assert 1 > draft.probs[0] > draft.probs[-1] > 0.9
    assert drafter.propose(2).tokens == draft.tokens[:2]
    for token in draft.tokens:
        assert np.flatnonzero(constraint.mask()).tolist() == [token]
        constraint.push(token)
    assert constraint.ended
    assert drafter.propose(16) == EMPTY


def promise(tokens: Sequence[int], hope: float) -> Draft:
    return Draft(tuple(tokens), "suffix", tuple(hope ** (i + 1) for i in range(len(tokens))))


def test_drafts_are_trimmed_where_the_grammar_forbids_them(json_vocabulary, scripted):
    constraint = json_vocabulary.constraint({"const": "abc12"})
    right, wrong = json_vocabulary('"abc12"')[:2], json_vocabulary("]]")
    chain = ChainOfSources([scripted([promise(wrong, 0.9)]), scripted([promise([*right, *wrong], 0.9)])], constraint)
    assert list(chain.propose(16).tokens) == right


def test_the_source_that_promises_most_wins(json_vocabulary, scripted):
    constraint = json_vocabulary.constraint({"const": "abc12"})
    right, wrong = json_vocabulary('"abc12"')[:2], json_vocabulary("]]")
    suffix = scripted([promise([*right[:1], *wrong], 0.9), promise(right, 0.999)])
    best = MostPromising([suffix, GrammarDrafter(constraint)], constraint)
    assert best.propose(16).source == "grammar"
    assert best.propose(2).source == "suffix"

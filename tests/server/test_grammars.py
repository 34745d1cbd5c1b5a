"""Compiled grammars over real tokenizers: what they allow, what is refused and where, and their bounds."""

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLParserLimits

from verdraft.server import grammars as module
from verdraft.server.errors import ApiError
from verdraft.server.grammars import Grammar, Grammars, build_engine
from verdraft.server.json_form import JsonForm, Place, forced_call
from verdraft.server.tokenizer import TextTokenizer
from verdraft.spec.constraint import Constraint, ConstraintFailed

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["the", "\u00e9\U0001f600", 4, None, True]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def form(schema: dict[str, Any]) -> JsonForm:
    return JsonForm("response_format", (Place("json_schema.schema", schema),))


@pytest.fixture(params=["byte_level_folder", "sentencepiece_folder"])
def tokenizer(request: pytest.FixtureRequest) -> TextTokenizer:
    return TextTokenizer(request.getfixturevalue(request.param))


def speak(constraint: Constraint, tokenizer: TextTokenizer, rnd: random.Random, steps: int = 400) -> str:
    """A random text that the grammar allows."""
    tokens: list[int] = []
    while not constraint.ended and len(tokens) < steps:
        mask = constraint.mask()
        assert mask is not None
        assert mask.size == tokenizer.vocab_size
        tokens.append(int(rnd.choice(np.flatnonzero(mask).tolist())))
        assert constraint.allows(tokens[-1])
        constraint.push(tokens[-1])
    return tokenizer.decode(tokens, show_special=True)


def test_random_texts_validate(tokenizer: TextTokenizer) -> None:
    """No special token is ever allowed, forced text keeps its bytes, and space between parts is bounded."""
    grammar = Grammars(tokenizer, frozenset()).compile(form(PERSON))
    for seed in range(12):
        text = speak(grammar.start(), tokenizer, random.Random(seed))
        jsonschema.validate(json.loads(text), PERSON)
        assert text.startswith("{")
        assert text.endswith("}")
        assert " " * 17 not in text


def test_an_end_token_is_allowed_where_a_value_may_end(byte_level_folder: Path) -> None:
    tokenizer = TextTokenizer(byte_level_folder)
    (end,) = tokenizer.encode("<|end|>", allow_special=True)
    constraint = Grammars(tokenizer, frozenset({end})).compile(form({"type": "integer"})).start()
    assert not constraint.allows(end)
    constraint.push(tokenizer.encode("7", allow_special=False)[0])
    assert constraint.allows(end)
    constraint.push(end)
    assert constraint.ended


def test_choices_of_a_request_go_their_own_ways(byte_level_folder: Path) -> None:
    tokenizer = TextTokenizer(byte_level_folder)
    grammar = Grammars(tokenizer, frozenset()).compile(form({"enum": ["ab", "cd"]}))
    one, two = grammar.start(), grammar.start()
    for token in tokenizer.encode('"c', allow_special=False):
        one.push(token)
    assert one.allows(tokenizer.encode("d", allow_special=False)[0])
    assert two.allows(tokenizer.encode('"', allow_special=False)[0])


def function(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **({"parameters": parameters} if parameters else {})}}


def test_a_call_of_one_of_several_functions(tokenizer: TextTokenizer) -> None:
    """Each with the references of its own schema."""
    closed = {"properties": {"city": {"$ref": "#/$defs/c"}}, "required": ["city"], "additionalProperties": False}
    tools = [
        function('say "a"', type="object", **closed, **{"$defs": {"c": {"enum": ["a"]}}}),
        function("b", **closed, **{"$defs": {"c": {"const": 1}}}),
    ]
    grammar = Grammars(tokenizer, frozenset()).compile(forced_call(tools))
    found = {}
    for seed in range(12):
        call = json.loads(speak(grammar.start(), tokenizer, random.Random(seed), 2000))
        assert list(call) == ["name", "arguments"]
        found[call["name"]] = call["arguments"]["city"]
    assert found == {'say "a"': "a", "b": 1}


def test_one_function_has_its_arguments_alone(tokenizer: TextTokenizer) -> None:
    grammars = Grammars(tokenizer, frozenset())
    assert speak(grammars.compile(forced_call([function("f")])).start(), tokenizer, random.Random(1), 1) == "{"


REFUSED = [
    ({"type": "wizard"}, "invalid_value", "json_schema.schema.type"),
    ({"items": {"not": {}}}, "unsupported_parameter", "json_schema.schema.items.not"),
    ({"properties": {"a": {"uniqueItems": True, "type": "array"}}}, "unsupported_parameter", ".a.uniqueItems"),
    ({"type": "string", "pattern": "^(?=a)b"}, "unsupported_parameter", "json_schema.schema.pattern"),
    ({"type": "string", "format": "xyz"}, "invalid_value", "json_schema.schema.format"),
    ({"$ref": "http://example.com/x"}, "invalid_value", "json_schema.schema.$ref"),
    ({"enum": []}, "invalid_value", "json_schema.schema"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "invalid_value", "json_schema.schema"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "unsupported_parameter", "json_schema.schema.not"),
    ({"$ref": "#"}, "invalid_value", "no way to begin"),
    ({"enum": ["x" * 70_000]}, "invalid_value", "65536 characters"),
    ({"type": "integer", "multipleOf": True}, "invalid_value", "json_schema.schema"),
    ({"type": "integer", "multipleOf": 999_983}, "unsupported_parameter", "schema.multipleOf"),
    ({"anyOf": [{"multipleOf": n} for n in (9973, 9967, 9949)]}, "unsupported_parameter", "schema.anyOf[1].multipleOf"),
    (
        {"$defs": {"m": {"multipleOf": 0.997}}, "allOf": [{"$ref": "#/$defs/m"}, {"multipleOf": 1.009}]},
        "unsupported_parameter",
        "schema.allOf[1].multipleOf",
    ),
    (
        {"allOf": [{"pattern": f".*a.{{{i}}}b"} for i in range(14)]},
        "unsupported_parameter",
        "schema.allOf[4].pattern",
    ),
]


@pytest.mark.parametrize(("schema", "code", "place"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_cannot_be_compiled_is_refused_with_its_place(
    byte_level_folder: Path, schema: dict[str, Any], code: str, place: str
) -> None:
    start = time.monotonic()
    with pytest.raises(ApiError) as error:
        Grammars(TextTokenizer(byte_level_folder), frozenset()).compile(form(schema))
    assert (error.value.param, error.value.code) == ("response_format", code)
    assert place in error.value.message
    assert len(error.value.message) < 500
    assert time.monotonic() - start < 5


def test_multiples_that_are_cheap_together_are_fine(byte_level_folder: Path) -> None:
    prices = {str(n): {"type": "number", "multipleOf": n} for n in (0.01, 5, 25.0, 3600 / 100)}
    grammars = Grammars(TextTokenizer(byte_level_folder), frozenset())
    assert grammars.compile(form({"type": "object", "properties": prices})).start().mask() is not None


def test_building_the_engine_counts_for_no_schema_and_keeps_nobody_waiting(
    byte_level_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first schema after a start always seemed to be a slow one, and whoever asked for another waited with it."""
    building, go_on = threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> Any:
        building.set()
        assert go_on.wait(20)
        time.sleep(module.MAX_RENEWAL_SECONDS)
        return build_engine(*arguments)

    monkeypatch.setattr(module, "build_engine", slowly)
    grammars = Grammars(TextTokenizer(byte_level_folder), frozenset())
    found: list[Grammar] = []
    thread = threading.Thread(target=lambda: found.append(grammars.compile(form({"const": 1}))))
    thread.start()
    assert building.wait(20)
    assert grammars.kept("another") is None
    go_on.set()
    thread.join(20)
    assert found[0].is_quick


def test_what_compiles_too_slowly_is_refused_in_time(byte_level_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SECONDS", 0.0)
    grammars = Grammars(TextTokenizer(byte_level_folder), frozenset())
    with pytest.raises(ApiError) as error:
        grammars.compile(form({"enum": [f"value {i}" for i in range(3000)]}))
    assert error.value.param == "response_format"
    assert grammars.num_entries == 0


def test_equal_forms_are_compiled_once_and_the_oldest_goes(
    byte_level_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 2)
    grammars = Grammars(TextTokenizer(byte_level_folder), frozenset())
    first = grammars.compile(form({"const": 1}))
    second = grammars.compile(form({"const": 2}))
    assert grammars.compile(form({"const": 1})) is first
    grammars.compile(form({"const": 3}))
    assert grammars.num_entries == 2
    assert grammars.compile(form({"const": 1})) is first
    assert grammars.compile(form({"const": 2})) is not second


@pytest.mark.parametrize("renewal_seconds", [10.0, 0.0])
def test_a_sequence_that_reaches_a_limit_fails_alone(
    byte_level_folder: Path, monkeypatch: pytest.MonkeyPatch, renewal_seconds: float
) -> None:
    """Copies of a matcher share its lexer: once that had failed, so did every other request with the same schema."""
    monkeypatch.setattr(module, "LIMITS", LLParserLimits(max_lexer_states=100, verbose_errors=False))
    monkeypatch.setattr(module, "MAX_RENEWAL_SECONDS", renewal_seconds)
    tokenizer = TextTokenizer(byte_level_folder)
    schema = {"type": "string", "pattern": "^(ok|[ab]*a[ab]{8})$"}  # another state for any last nine letters
    grammars = Grammars(tokenizer, frozenset())
    grammar = grammars.compile(form(schema))
    while not grammar.is_quick and len(grammar.spares) < module.NUM_SPARES:
        time.sleep(0.01)
    greedy, neighbour = grammar.start(), grammar.start()
    greedy.push(*tokenizer.encode('"', allow_special=False))
    for letter in random.Random(0).choices("ab", k=200):
        greedy.push(*tokenizer.encode(letter, allow_special=False))
    with pytest.raises(ConstraintFailed):
        greedy.mask()
    later = grammars.compile(form(schema)).start()
    for constraint in (neighbour, grammar.start(), later):
        for token in tokenizer.encode('"ok"', allow_special=False):
            assert constraint.mask() is not None
            assert constraint.allows(token)
            constraint.push(token)
        assert constraint.ended

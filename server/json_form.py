"""What an answer must look like when it must be JSON: one schema, or a call of one of several functions.

Written as a grammar in llguidance's language. Knows JSON schemas, no tokenizer and no request.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]

# Set last, so that a schema's own "x-guidance" changes nothing.
OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \t\n\r]{1,16}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
QUOTED = ("type", "format", "pattern", "$ref")  # keywords whose value a message quotes
ANY_OBJECT: Schema = {"type": "object"}
HEAD, TAIL = '{{"name": {}, "arguments": ', "}"


@dataclass(frozen=True, slots=True)
class Place:
    """A schema of the request and where it stands there, e.g. "json_schema.schema"."""

    path: str
    schema: Schema


@dataclass(frozen=True, slots=True)
class JsonForm:
    """`param` is the field that asked for it. Of several `heads` the answer has one, before JSON of the same place;
    then comes `tail`. `calls` are the functions' names, one for each place; none: the answer is plain JSON."""

    param: str
    places: tuple[Place, ...]
    calls: tuple[str, ...] = ()

    @property
    def heads(self) -> tuple[str, ...]:
        return (
            tuple(HEAD.format(json.dumps(name, ensure_ascii=False)) for name in self.calls)
            if len(self.calls) > 1
            else ("",)
        )

    @property
    def tail(self) -> str:
        return TAIL if len(self.calls) > 1 else ""

    def grammar(self) -> str:
        """In Lark's syntax; equal forms have equal ones."""
        pairs = enumerate(zip(self.heads, self.places, strict=True))
        rules = [_rule(i, head, self.tail, place.schema) for i, (head, place) in pairs]
        return "\n".join([f"start: {' | '.join(f'form{i}' for i in range(len(rules)))}", *rules])


def _rule(i: int, head: str, tail: str, schema: Schema) -> str:
    texts = [json.dumps(text) for text in (head, tail) if text]
    parts = [*texts[:1], f"json{i}", *texts[1:]]
    return f"form{i}: {' '.join(parts)}\njson{i}: %json {json.dumps({**schema, 'x-guidance': OPTIONS})}"


def forced_call(tools: Sequence[Mapping[str, Any]]) -> JsonForm:
    """A call of one of them. `tools` are in the form of chat completions, already checked."""
    functions = [tool["function"] for tool in tools]
    places = (Place(f"{one['name']}.parameters", _object(one.get("parameters"))) for one in functions)
    return JsonForm("tools", tuple(places), tuple(one["name"] for one in functions))


def _object(parameters: Schema | None) -> Schema:
    """Arguments are an object, whatever else a schema says of them."""
    if not parameters:
        return ANY_OBJECT
    return parameters if "type" in parameters or "$ref" in parameters else {"type": "object", **parameters}


def find_keyword(schema: Any, path: str, message: str) -> str:
    """Where in a schema an error message of the grammar engine points: a keyword or a value that it quotes; or ""."""
    for place, key, value in keywords(schema, path):
        if f'"{key}"' in message and "keys" in message:
            return f"{place}.{key}"
        if key in QUOTED and isinstance(value, str) and value and value in message:
            return f"{place}.{key}"
    return ""


def keywords(value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """(path of the object, key, value) of every object within."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield path, key, entry
            yield from keywords(entry, f"{path}.{key}")
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from keywords(entry, f"{path}[{index}]")

"""The Jinja environment that chat templates are written for: sandboxed, with the helpers that models' templates use.

A template comes with the model, never with a request, so it may be bad: it reaches nothing but its values, and it is
stopped when it takes or gives too much. What a client sends is bounded, and by MAX_CHARS where a helper makes more of
it. What else a single expression takes is not: a model that is to take all memory needs no template for that.
"""

import io
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDER_SECONDS = 10.0  # for one prompt; four megabytes of messages take two
MAX_CHARS = 1 << 26  # of one prompt
MAX_PRODUCT = 1 << 24  # characters or entries of "text" * number


class Template:
    """A compiled template; see compile_template()."""

    def __init__(self, source: str) -> None:
        self._environment = _environment()
        self._template = self._environment.from_string(source)
        self.variables = meta.find_undeclared_variables(self._environment.parse(source))  # that it reads

    def render(self, values: Mapping[str, Any], **more: Any) -> str:
        """Raises jinja2.TemplateError, also beyond RENDER_SECONDS or MAX_CHARS, and what Python raises inside it."""
        self._environment.clock.deadline = time.monotonic() + RENDER_SECONDS
        return _bounded(self._template.generate(values, **more))


def _bounded(pieces: Iterable[str]) -> str:
    """All of them. Raises TemplateError beyond MAX_CHARS."""
    text = io.StringIO()
    for piece in pieces:
        if text.tell() + len(piece) > MAX_CHARS:
            raise TemplateError(f"it gives more than {MAX_CHARS} characters")
        text.write(piece)
    return text.getvalue()


def compile_template(source: str) -> Template:
    """Raises jinja2.TemplateError. The result may be rendered in any thread."""
    return Template(source)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Looks at the clock in every turn of a loop and every call, and refuses endless arithmetic."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.clock = threading.local()  # .deadline, in time.monotonic() seconds
        self.filters["_in_time"] = self._in_time

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_in_time", [], [], None, None, lineno=loop.lineno)
        return super()._generate(source, *args, **options)

    def _in_time(self, entries: Iterable[Any]) -> Iterator[Any]:
        for entry in entries:
            self._check()
            yield entry

    def call(self, context: Any, obj: Any, /, *args: Any, **options: Any) -> Any:
        self._check()
        return super().call(context, obj, *args, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise TemplateError("the operator ** is not supported")
        for many, count in ((left, right), (right, left)):
            if isinstance(count, int) and hasattr(many, "__len__") and len(many) * count > MAX_PRODUCT:
                raise TemplateError("a product is too long")
        return super().call_binop(context, operator, left, right)

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Unlike Jinja's own, without HTML escapes. Indents can make it a hundred times what a client sent."""
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        if indent is None:
            return encoder.encode(value)
        return _bounded(self._in_time(encoder.iterencode(value)))

    def _check(self) -> None:
        if time.monotonic() > self.clock.deadline:
            raise TemplateError(f"it takes longer than {RENDER_SECONDS:g} seconds")


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = environment.tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's tokens for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  # read by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)

"""Compiled grammars of JSON forms: built for a model's tokens, bounded in size and time, the latest ones kept.

Everything may run in any thread but the event loop's.
"""

import contextlib
import math
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from verdraft.server.errors import ApiError, invalid_value, rate_limited, unsupported_parameter
from verdraft.server.fields import is_number
from verdraft.server.json_form import JsonForm, Place, find_keyword, keywords
from verdraft.server.tokenizer import TextTokenizer
from verdraft.spec.constraint import Constraint
from verdraft.spec.grammar import GrammarConstraint

MAX_GRAMMAR_CHARS = 64 << 10
MAX_ENTRIES = 64
MAX_SECONDS = 4.0  # to compile
MAX_RENEWAL_SECONDS = 0.1  # to compile once more beside the engine's steps; a common schema takes a few milliseconds
NUM_SPARES = 2  # of a schema that takes longer
MAX_COMPILING = 2  # at once
SEAT_SECONDS = 1.0  # to wait for the end of one of those
LEAST_PRIORITY = 19  # as `nice` has it
MAX_MULTIPLE = 100_000  # least common one of all multipleOf in a schema: so many states may an automaton get
MAX_CONJUNCTION = 4  # patterns within allOf
LIMITS = LLParserLimits(max_lexer_states=50_000, step_lexer_fuel=100_000, step_max_items=20_000, verbose_errors=False)

_SOURCE = re.compile(r"^ +1 \| ", re.MULTILINE)  # where a message begins to print the grammar
_PREFIX = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


@dataclass(slots=True)
class Grammar:
    """A compiled form. `start` gives each choice a place of its own in it; `build` compiles it again.

    All places share the lexer of `matcher`. When it reaches a limit, it fails for all of them: `failed` then. Each gets
    a new one at once where compiling is quick; else `spares` are made beforehand, beside the engine.
    """

    matcher: LLMatcher
    vocab_size: int
    build: Callable[[], LLMatcher]
    seconds: float  # that compiling took
    failed: bool = False
    spares: list[LLMatcher] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> Constraint:
        """At the beginning."""
        with self._lock:
            return GrammarConstraint(self.matcher.deep_copy(), self.vocab_size, self._renew)

    def _renew(self) -> LLMatcher:
        """A matcher for a sequence whose lexer has failed.

        The first to notice may have driven it there alone, so it shares no spare with the others.
        """
        self.failed = True
        if self.is_quick:
            return self.build()
        with self._lock:
            if len(self.spares) > 1:
                return self.spares.pop()
            return (self.spares or [self.matcher])[0].deep_copy()

    @property
    def is_quick(self) -> bool:
        """Whether the engine may wait until it is compiled once more."""
        return self.seconds < MAX_RENEWAL_SECONDS

    def make_spares(self) -> None:
        """Takes NUM_SPARES times as long as compiling."""
        for _ in range(NUM_SPARES):
            self.spares.append(self.build())


class Grammars:
    """compile() gives the grammar of a form; equal forms are compiled once as long as they are remembered."""

    def __init__(self, tokenizer: TextTokenizer, eos: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = eos
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._engine_lock = threading.Lock()
        self._seats = threading.Semaphore(MAX_COMPILING)
        self._engine: LLTokenizer | None = None

    @property
    def num_entries(self) -> int:
        """Grammars kept, at most MAX_ENTRIES."""
        return len(self._kept)

    def compile(self, form: JsonForm) -> Grammar:
        """Takes at most SEAT_SECONDS and MAX_SECONDS, and once as long as the engine needs for its tokens.

        Raises ApiError: 400 that names `form.param` and the place in it; 429 when too many others compile.
        """
        source = form.grammar()
        if len(source) > MAX_GRAMMAR_CHARS:
            raise invalid_value(form.param, f"the schema has more than {MAX_GRAMMAR_CHARS} characters")
        if kept := self.kept(source):
            return kept
        for place in form.places:
            check_costs(form, place)
        self._engine_of_tokens()
        grammar = self._compile(form, source)
        with self._lock:
            self._kept[source] = grammar
            while len(self._kept) > MAX_ENTRIES:
                self._kept.popitem(last=False)
        if not grammar.is_quick:
            _yield_to_others(_start(grammar.make_spares))
        return grammar

    def kept(self, source: str) -> Grammar | None:
        """What compiling that text gave, if it is remembered."""
        with self._lock:
            grammar = self._kept.pop(source, None)
            if grammar is None or grammar.failed:
                return None
            self._kept[source] = grammar  # the latest
            return grammar

    def _compile(self, form: JsonForm, source: str) -> Grammar:
        if not self._seats.acquire(timeout=SEAT_SECONDS):
            raise rate_limited("schemas are being compiled", retry_after=round(MAX_SECONDS))
        found: list[LLMatcher] = []

        def work() -> None:
            try:
                found.append(self._matcher(source))
            finally:
                self._seats.release()

        # NOTE: a thread cannot be stopped. One that takes too long goes on with what time nobody else wants, and keeps
        # its seat until it ends.
        began = time.monotonic()
        thread = _start(work)
        thread.join(MAX_SECONDS)
        if not found:
            _yield_to_others(thread)
            raise _too_slow(form)
        (matcher,) = found
        if matcher.is_error():
            raise _refused(form, matcher.get_error())
        if not any(_mask(matcher)):
            raise invalid_value(form.param, "nothing satisfies the schema: it leaves no way to begin")
        seconds = time.monotonic() - began
        return Grammar(matcher, self._tokenizer.vocab_size, partial(self._matcher, source), seconds)

    def _matcher(self, source: str) -> LLMatcher:
        matcher = LLMatcher(self._engine_of_tokens(), source, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            _mask(matcher)  # builds what all copies share
        return matcher

    def _engine_of_tokens(self) -> LLTokenizer:
        """Built when the first grammar is asked for: it takes up to a second."""
        with self._engine_lock:
            if self._engine is None:
                self._engine = build_engine(self._tokenizer, self._eos)
            return self._engine


def _start(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="verdraft-grammar", daemon=True)
    thread.start()
    return thread


def _yield_to_others(thread: threading.Thread) -> None:
    """Linux gives every thread a priority of its own."""
    if thread.native_id is not None and thread.is_alive():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, thread.native_id, LEAST_PRIORITY)


def _mask(matcher: LLMatcher) -> bytes:
    """Which tokens may come first, as bits; none of them set when the grammar leads nowhere."""
    beginning = matcher.deep_copy()
    mask = beginning.compute_bitmask()
    return b"" if beginning.is_error() else mask


def check_costs(form: JsonForm, place: Place) -> None:
    """Refuse what the engine would work on for minutes: automata of large multiples, and of patterns in conjunction.

    References and `anyOf` too make it look for numbers that are multiples of several, so all of them count together.
    """
    num_patterns = 0
    multiples: list[Decimal] = []
    for path, key, value in keywords(place.schema, place.path):
        if key == "multipleOf" and is_number(value):
            multiples.append(Decimal(str(value)))
            if least_common(multiples) > MAX_MULTIPLE:
                message = f"'{form.param}': what is a multiple of every multipleOf may be at most {MAX_MULTIPLE} units"
                raise unsupported_parameter(form.param, f"{message} of the last digit; see {path}.multipleOf")
        num_patterns += ".allOf[" in path and key in ("pattern", "multipleOf", "format", "patternProperties")
        if num_patterns > MAX_CONJUNCTION:
            message = f"'{form.param}': at most {MAX_CONJUNCTION} patterns may stand within allOf; see {path}.{key}"
            raise unsupported_parameter(form.param, message)


def least_common(multiples: Sequence[Decimal]) -> int:
    """The least common multiple, in units of the last digit that any of them has."""
    digits = max(-int(one.normalize().as_tuple().exponent) for one in multiples)
    return math.lcm(*(int(one.scaleb(max(digits, 0))) for one in multiples))


def _too_slow(form: JsonForm) -> ApiError:
    return invalid_value(form.param, f"the schema cannot be compiled within {MAX_SECONDS:g} seconds")


def _refused(form: JsonForm, message: str) -> ApiError:
    """What the engine says, without the grammar's source that follows; the place is found by what it quotes."""
    said = _PREFIX.sub("", _SOURCE.split(message, maxsplit=1)[0])
    places = (find_keyword(place.schema, place.path, said) for place in form.places)
    where = next((place for place in places if place), form.places[0].path)
    text = " ".join(said.split())[:200]
    if "Unimplemented" in text or "not supported" in text:
        return unsupported_parameter(form.param, f"'{form.param}': not supported at {where}: {text}")
    return invalid_value(form.param, f"not a usable schema at {where}: {text}")


class _Vocabulary:
    """What llguidance asks of a tokenizer. `encode` cuts forced text into tokens; it must give back the same bytes."""

    def __init__(self, tokenizer: TextTokenizer, eos: frozenset[int]) -> None:
        size = tokenizer.vocab_size
        unseen = [token for token in range(size) if token in eos or tokenizer.token_bytes(token) is None]
        self.tokens = [tokenizer.token_bytes(token) or b"" for token in range(size)]
        for token in unseen:
            self.tokens[token] = f"<{token}>".encode()
        self.tokens.append(b"<end>")  # ends the text of a model without an end token; never chosen
        self.special_token_ids = [*unseen, size]
        self.eos_token_ids = sorted(eos) or [size]
        self.eos_token_id = self.eos_token_ids[0]
        self.bos_token_id = None
        self.encode: Callable[[str], list[int]] = lru_cache(4096)(self._encode)
        self._tokenizer = tokenizer
        self.greedy: Callable[[str], list[int]] = lambda text: []

    def __call__(self, text: Any) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text is wanted")
        return self.encode(text)

    def _encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode_inner(text)
        exact = b"".join(self._tokenizer.token_bytes(token) or b"" for token in ids) == text.encode()
        return ids if exact else self.greedy(text)


def build_engine(tokenizer: TextTokenizer, eos: frozenset[int]) -> LLTokenizer:
    """llguidance's view of a model's tokens: their exact bytes; tokens without any are never possible."""
    vocabulary = _Vocabulary(tokenizer, eos)
    engine = LLTokenizer(
        TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_token_ids
    )
    vocabulary.greedy = engine.greedy_tokenize
    return engine

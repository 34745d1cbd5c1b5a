"""Sampling parameters for offline use, checked when they are made. The HTTP API has parsers of its own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from verdraft.scheduler import params

INT64_BOUND = 2**63
BIAS_BOUND = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(params.SamplingParams):
    """Ranges as in the HTTP API, but n, stop and logprobs have no upper bound. Raises ValueError that names the field.

    Token ids are checked against the vocabulary when they are used.
    """

    max_tokens: int | None = 16  # as in vLLM and for text completions over HTTP; None: all that fits
    stop: str | Sequence[str] = ()  # generation ends with the first token that completes one of them
    n: int = 1  # choices for each prompt

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0, 2)
        _number("top_p", self.top_p, math.nextafter(0, 1), 1)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, math.nextafter(0, 1))
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _integer("top_k", self.top_k, -1, INT64_BOUND - 1)
        _integer("n", self.n, 1)
        _integer("max_tokens", self.max_tokens, 1)
        _integer("logprobs", self.logprobs, 0)
        _integer("seed", self.seed, -INT64_BOUND, INT64_BOUND - 1)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_bias(self.logit_bias)
        _check_stop(self.stop)

    @property
    def resolved(self) -> Self:
        """As an engine takes them, where 0 alone turns top_k off."""
        return replace(self, top_k=0) if self.top_k < 0 else self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _number(name: str, value: object, low: float, high: float | None = None) -> None:
    """Finite, from `low` to `high`."""
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fine or not low <= value <= (math.inf if high is None else high):  # type: ignore[operator]
        raise ValueError(f"{name}: expected a number {_bounds(low, high)}, got {value!r}")


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """An integer from `low` to `high`; None stands for the default."""
    if value is None:
        return
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or not low <= value <= (math.inf if high is None else high)
    ):
        raise ValueError(f"{name}: expected an integer {_bounds(low, high)}, got {value!r}")


def _bounds(low: float, high: float | None) -> str:
    above = "above 0" if 0 < low < 1 else f"of at least {low}"
    return above if high is None else f"{above} and at most {high}"


def _check_bias(bias: object) -> None:
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias: expected token ids and numbers, got {bias!r}")
    for token, value in bias.items():
        _number(f"logit_bias[{token!r}]", value, -BIAS_BOUND, BIAS_BOUND)


def _check_stop(stop: object) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(one, str) and one for one in stops):
        raise ValueError(f"stop: expected non-empty strings, got {stop!r}")

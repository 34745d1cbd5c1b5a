"""What leaves the engine: immutable slices of tokens, and what a finished sequence reports."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from verdraft.spec.draft import Source

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of the raw distribution at one position, floored at -9999."""

    logprob: float  # of the chosen token
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), descending


@dataclass(slots=True)
class SourceStats:
    """Draft tokens that the full model verified, of one source."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)  # accepted tokens by their place in the draft

    def count(self, drafted: int, accepted: int) -> None:
        """One more draft."""
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self.accepted_per_pos += [0] * (accepted - len(self.accepted_per_pos))
        for position in range(accepted):
            self.accepted_per_pos[position] += 1

    def add(self, other: "SourceStats") -> None:
        """Sum up."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        pairs = zip_longest(self.accepted_per_pos, other.accepted_per_pos, fillvalue=0)
        self.accepted_per_pos = [a + b for a, b in pairs]


@dataclass(slots=True)
class Margins:
    """How far committed tokens led, where kernels are not exact and the device finds the tokens: by how much the logit
    of each might have been lower before another token had come, in rounding steps of the model's float type (its eps
    times the largest logit).

    In another batch, or behind another draft, the logits of two tokens may each be a step off, so a lead of NEAR steps
    is a near tie, which other low bits might have decided otherwise. It is no bound: many layers can add up to more.
    """

    NEAR: ClassVar[float] = 2.0
    least: float = inf
    num_known: int = 0
    num_near: int = 0

    def count(self, margins: Sequence[float]) -> None:
        """One more for each token."""
        self.add(Margins(min(margins, default=inf), len(margins), sum(margin <= self.NEAR for margin in margins)))

    def add(self, other: "Margins") -> None:
        """Sum up."""
        self.least = min(self.least, other.least)
        self.num_known += other.num_known
        self.num_near += other.num_near


@dataclass(slots=True)
class SpecStats:
    """Speculation of one sequence; `num_steps` counts passes that verified at least one draft token."""

    num_steps: int = 0
    num_target_passes: int = 0
    given_up: bool = False  # exits agreed too seldom with the full model and draft no more
    sources: dict[Source, SourceStats] = field(default_factory=dict)
    margins: Margins = field(default_factory=Margins)


@dataclass(frozen=True, slots=True)
class Timing:
    """time.monotonic() seconds of a sequence's life; None where it never got that far."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Comes with the last slice of a sequence."""

    cached_tokens: int  # prompt tokens taken from the prefix cache
    num_output_tokens: int
    spec: SpecStats
    timing: Timing


class TokenSlice(NamedTuple):
    """Tokens committed in one step. The slice with `finish` is the last and carries `summary`."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token when asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # once, prompt[1:], before the first token
    finish: FinishReason | None = None
    error_code: str | None = None  # with finish == "error": a code of the HTTP contract's section 3
    summary: Summary | None = None

"""What a request used and how its speculation went (HTTP contract, sections 7 and 9), summed over its choices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from verdraft.scheduler.outputs import Margins, SourceStats, Summary
from verdraft.spec.draft import Source


@dataclass(slots=True)
class Report:
    """add() every choice's summary; then usage() and speculation()."""

    prompt_lens: Sequence[int]  # tokens, one for each prompt
    n: int
    mode: str  # what `speculation` meant for this request
    with_prediction: bool
    with_reasoning: bool  # the model thinks
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    num_steps: int = 0
    num_target_passes: int = 0
    sources: dict[Source, SourceStats] = field(default_factory=dict)
    summaries: list[Summary] = field(default_factory=list)  # in the order in which the choices ended

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompt_lens)

    def add(self, index: int, summary: Summary, reasoning_tokens: int) -> None:
        """`index` is the response's choice index; a prompt's first choice speaks for its cached tokens."""
        self.summaries.append(summary)
        self.reasoning_tokens += reasoning_tokens
        self.completion_tokens += summary.num_output_tokens
        if index % self.n == 0:
            self.cached_tokens += summary.cached_tokens
        self.num_steps += summary.spec.num_steps
        self.num_target_passes += summary.spec.num_target_passes
        for source, stats in summary.spec.sources.items():
            self.sources.setdefault(source, SourceStats()).add(stats)

    def usage(self) -> dict[str, Any]:
        """The `usage` object; the prediction's two numbers only when a prediction was sent."""
        details: dict[str, int] = {}
        if self.with_prediction:
            stats = self.sources.get("prediction", SourceStats())
            details["accepted_prediction_tokens"] = stats.num_accepted_tokens
            details["rejected_prediction_tokens"] = stats.num_draft_tokens - stats.num_accepted_tokens
        if self.with_reasoning:
            details["reasoning_tokens"] = self.reasoning_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        return usage | ({"completion_tokens_details": details} if details else {})

    def speculation(self) -> dict[str, Any]:
        """The `speculation` object. `exits_given_up`: in some choice they agreed too seldom with the full model."""
        found: dict[str, Any] = {
            "mode": self.mode,
            "exits_given_up": any(summary.spec.given_up for summary in self.summaries),
        }
        found |= {"num_target_passes": self.num_target_passes, "cycles_per_1000_tokens": self._cycles_per_1000_tokens}
        found |= acceptance(self.num_steps, self.sources)
        for source, stats in self.sources.items():
            found["sources"][source]["num_accepted_per_position"] = stats.accepted_per_pos
        return found | self._margins()

    def _margins(self) -> dict[str, Any]:
        """Only where some are known, which is nowhere with exact kernels."""
        margins = Margins()
        for summary in self.summaries:
            margins.add(summary.spec.margins)
        least = margins.least if isfinite(margins.least) else None
        return {"near_ties": margins.num_near, "least_margin": least} if margins.num_known else {}

    @property
    def _cycles_per_1000_tokens(self) -> float:
        return 1000.0 * self.num_target_passes / self.completion_tokens if self.completion_tokens else 0.0


def acceptance(num_steps: int, sources: Mapping[Source, SourceStats]) -> dict[str, Any]:
    """How drafts went, in all and by source."""
    drafted = sum(stats.num_draft_tokens for stats in sources.values())
    accepted = sum(stats.num_accepted_tokens for stats in sources.values())
    return {
        "num_spec_steps": num_steps,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "mean_acceptance_length": 1.0 + (accepted / num_steps if num_steps else 0.0),
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "sources": {
            source: {
                "num_draft_tokens": stats.num_draft_tokens,
                "num_accepted_draft_tokens": stats.num_accepted_tokens,
            }
            for source, stats in sources.items()
        },
    }

"""What a generating request came to: the line it gets in the log, and its span in a trace. Holds no text."""

from dataclasses import dataclass
from typing import Any

from verdraft.scheduler.outputs import Timing
from verdraft.server.choices import Finish
from verdraft.server.report import Report


@dataclass(frozen=True, slots=True)
class Outcome:
    """`reason` is None when the request ended before any of its sequences did."""

    response_id: str
    model: str
    reason: Finish | None
    report: Report

    def fields(self) -> dict[str, Any]:
        """Names and values for the log; what never happened is left out."""
        report = self.report
        fields = {
            "response_id": self.response_id,
            "prompt_tokens": report.prompt_tokens,
            "cached_tokens": report.cached_tokens,
            "completion_tokens": report.completion_tokens,
            "finish_reason": self.reason,
        }
        return fields | _times([summary.timing for summary in report.summaries])


def _times(timings: list[Timing]) -> dict[str, float]:
    """Seconds from arrival to the first step and to the first token of any choice."""
    if not timings:
        return {}
    arrived = min(timing.arrived for timing in timings)
    moments = {
        "queue_seconds": [timing.scheduled for timing in timings if timing.scheduled is not None],
        "first_token_seconds": [timing.first_token for timing in timings if timing.first_token is not None],
    }
    return {name: round(min(found) - arrived, 4) for name, found in moments.items() if found}

"""The arithmetic of the load report: answers in, rates, ratios and tables out. Pure functions, no clock."""

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from verdraft.bench.client import Answer


@dataclass(slots=True)
class Cell:
    """All answers of one mode at one concurrency; `wall` is the time during which that mode had the server."""

    mode: str
    concurrency: int
    answers: list[Answer] = field(default_factory=list)
    workloads: list[str] = field(default_factory=list)  # one per answer
    wall: float = 0.0  # seconds

    @property
    def decode_rate(self) -> float:
        """Tokens/s of one stream, from its first token to its last, weighted by time."""
        return decode_rate(self.answers)

    @property
    def total_rate(self) -> float:
        """Tokens/s of all streams together."""
        return rate(sum(len(a.ids) for a in self.answers), self.wall)

    @property
    def prefill_rate(self) -> float:
        """Uncached prompt tokens/s up to the first token; without a queue (concurrency 1) this is prefill."""
        return rate(
            sum(len(a.prompt_ids) - a.cached_tokens for a in self.answers),
            sum(a.ttft for a in self.answers),
        )

    @property
    def ttft(self) -> float:
        """Median seconds to the first token."""
        return statistics.median(a.ttft for a in self.answers) if self.answers else 0.0

    @property
    def accepted_len(self) -> float:
        """Mean tokens kept per verification pass, the bonus included; 1 without drafts."""
        return 1 + rate(sum(a.num_accepted for a in self.answers), sum(a.num_spec_steps for a in self.answers))

    def summary(self) -> dict[str, Any]:
        """The numbers of this cell for the JSON report."""
        return {
            "mode": self.mode,
            "concurrency": self.concurrency,
            "requests": len(self.answers),
            "prompt_tokens": sum(len(a.prompt_ids) for a in self.answers),
            "output_tokens": sum(len(a.ids) for a in self.answers),
            "decode_tokens_per_s": self.decode_rate,
            "prefill_tokens_per_s": self.prefill_rate,
            "total_tokens_per_s": self.total_rate,
            "ttft_s_median": self.ttft,
            "mean_accepted_length": self.accepted_len,
            "wall_s": self.wall,
        }


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Two answers to one prompt that differ, at output position `at`."""

    prompt: str
    mode: str
    concurrency: int
    at: int


def rate(amount: float, seconds: float) -> float:
    """amount / seconds, and 0 when nothing was measured."""
    return amount / seconds if seconds > 0 else 0.0


def decode_rate(answers: Sequence[Answer]) -> float:
    """Tokens after the first ones / the time they took."""
    return rate(sum(a.num_decoded for a in answers), sum(a.decode_time for a in answers))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two sequences differ (one ending counts); None when they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def main_table(cells: Sequence[Cell]) -> str:
    """One row per cell; ratios are to the first mode at the same concurrency."""
    rows = [
        "| streams | mode | decode tokens/s per stream | total tokens/s | prefill tokens/s | TTFT ms | accepted len |"
    ]
    rows.append("|---|---|---|---|---|---|---|")
    for cell in cells:
        base = next(c for c in cells if c.concurrency == cell.concurrency)
        decode, total, prefill = (
            with_ratio(getattr(cell, name), getattr(base, name))
            for name in ("decode_rate", "total_rate", "prefill_rate")
        )
        times = f"{cell.ttft * 1000:.0f} | {cell.accepted_len:.2f}"
        rows.append(f"| {cell.concurrency} | {cell.mode} | {decode} | {total} | {prefill} | {times} |")
    return "\n".join(rows)


def workload_table(cells: Sequence[Cell]) -> str:
    """Decode tokens/s of one stream: a row per workload, a column per mode; only cells of one stream count."""
    single = [c for c in cells if c.concurrency == 1]
    rows = ["| workload | " + " | ".join(c.mode for c in single) + " |", "|---" * (len(single) + 1) + "|"]
    for workload in sorted({w for c in single for w in c.workloads}):
        rates = [decode_rate([a for a, w in zip(c.answers, c.workloads, strict=True) if w == workload]) for c in single]
        rows.append(f"| {workload} | " + " | ".join(with_ratio(r, rates[0]) for r in rates) + " |")
    return "\n".join(rows)


def with_ratio(value: float, base: float) -> str:
    """`12.3 (1.52x)`; without a base the value alone."""
    return f"{value:.1f} ({value / base:.2f}x)" if base > 0 else f"{value:.1f}"


def machine() -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "verdraft")},
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            return next((line.split(":")[1].strip() for line in info if line.startswith("model name")), "unknown")
    except OSError:
        return platform.processor() or "unknown"

"""The arithmetic of the comparison with peers: timings in, rates, ratios and tables out. Knows no peer, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verdraft.bench.report import rate, with_ratio

OURS = "verdraft"
TITLES = {
    "chat": "chat, decode tokens/s",
    "edit": "edit, decode tokens/s",
    "agentic": "agentic, decode tokens/s",
    "structured": "structured, decode tokens/s",
    "prefill": "prefill tokens/s",
}


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer as its client saw it. Of a batch that was measured as a whole, only the counts are known."""

    prompt_tokens: int
    num_tokens: int
    ttft: float = 0.0  # seconds to the first token
    decode_time: float = 0.0  # seconds from the first token to the last


@dataclass(frozen=True, slots=True)
class Round:
    """All answers of one task in one round, and the seconds that they took together."""

    timings: Sequence[Timing]
    wall: float


@dataclass(slots=True)
class Row:
    """One peer in one configuration; `rounds` fills as the run goes."""

    peer: str
    speculation: str  # "none", or the method and its sizes
    precision: str
    rounds: dict[str, list[Round]] = field(default_factory=dict)  # by task: a key of TITLES, or a number of streams
    failures: list[str] = field(default_factory=list)

    @property
    def speculates(self) -> bool:
        return self.speculation != "none"

    def value(self, task: str) -> float:
        """The rate over all rounds, weighted by time; 0 when the task was not measured."""
        return value(task, self.rounds.get(task, []))

    def summary(self) -> dict[str, Any]:
        """The numbers of this row for the JSON report, also round by round."""
        return {
            "peer": self.peer,
            "speculation": self.speculation,
            "precision": self.precision,
            "failures": self.failures,
            "tasks": {
                task: {
                    "tokens_per_s": self.value(task),
                    "by_round": [value(task, [r]) for r in rounds],
                    "prompt_tokens": [[t.prompt_tokens for t in r.timings] for r in rounds],
                    "output_tokens": [[t.num_tokens for t in r.timings] for r in rounds],
                }
                for task, rounds in self.rounds.items()
            },
        }


def value(task: str, rounds: Sequence[Round]) -> float:
    """Tokens/s: of decoding, of prefill, or of all streams together from the first request to the last token."""
    timings = [t for r in rounds for t in r.timings]
    if task == "prefill":
        return rate(sum(t.prompt_tokens for t in timings), sum(t.ttft for t in timings))
    if task in TITLES:
        return rate(sum(t.num_tokens - 1 for t in timings), sum(t.decode_time for t in timings))
    return rate(sum(t.num_tokens for t in timings), sum(r.wall for r in rounds))


def title(task: str) -> str:
    """The head of a task's column."""
    return TITLES.get(task, f"{task} streams, total tokens/s")


def table(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    """One line per row; ratios are to the row of verdraft among them, "-" was not measured."""
    base = next((r for r in rows if r.peer == OURS), None)
    lines = ["| peer | speculation | " + " | ".join(map(title, tasks)) + " |", "|---" * (len(tasks) + 2) + "|"]
    for row in rows:
        cells = [_cell(row.value(task), base.value(task) if base and base is not row else 0.0) for task in tasks]
        lines.append(f"| {row.peer} | {row.speculation} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def best_table(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    """Per task the fastest row of verdraft against the fastest row of all others, whatever they speculate."""
    lines = ["| task | verdraft | best peer | verdraft / best peer |", "|---|---|---|---|"]
    for task in tasks:
        ours, theirs = (
            max((r for r in rows if (r.peer == OURS) is mine), key=lambda r: r.value(task), default=None)
            for mine in (True, False)
        )
        if ours and theirs and theirs.value(task) > 0:
            ratio = f"{ours.value(task) / theirs.value(task):.2f}x"
            lines.append(f"| {title(task)} | {_named(ours, task)} | {theirs.peer}: {_named(theirs, task)} | {ratio} |")
    return "\n".join(lines)


def uneven_prompts(rows: Sequence[Row]) -> list[str]:
    """Peers whose prompts have not the lengths of the first row's: another chat template or tokenizer."""
    if not rows:
        return []
    lengths = [
        {task: [t.prompt_tokens for r in rounds for t in r.timings] for task, rounds in row.rounds.items()}
        for row in rows
    ]
    return [
        f"{row.peer} ({row.speculation}), {task}"
        for row, own in zip(rows, lengths, strict=True)
        for task, counts in own.items()
        if task in lengths[0] and counts != lengths[0][task]
    ]


def markdown(report: dict[str, Any], rows: Sequence[Row], tasks: Sequence[str]) -> str:
    """The report for people."""
    about = " · ".join(f"{name} {text}" for name, text in report["machine"].items())
    notes = [f"- {r.peer}, speculation {r.speculation}: {r.precision}" for r in rows]
    notes += [f"- {r.peer}, speculation {r.speculation} failed: {f}" for r in rows for f in r.failures]
    notes += [f"- prompts of another length than verdraft's: {where}" for where in report["uneven_prompts"]]
    parts = [about, *(table([r for r in rows if r.speculates is wanted], tasks) for wanted in (False, True))]
    return "\n\n".join([*parts, best_table(rows, tasks), "\n".join(notes), ""])


def _cell(found: float, base: float) -> str:
    return with_ratio(found, base) if found > 0 else "-"


def _named(row: Row, task: str) -> str:
    return f"{row.value(task):.1f} ({row.speculation})"

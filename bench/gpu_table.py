"""The short table of bench/gpu.py: a row for every case, a column for every form. Knows no kernel."""

from collections.abc import Iterator, Sequence
from typing import Final

from verdraft.bench.gpu_meter import Line

WIDTH: Final = 22  # of a column


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Microseconds of the lines that belong here, part by part, each with its ratio to its own floor; the column of
    floors is that of the first form. Empty where nothing was measured."""
    short = [line for line in lines if line.short]
    for part in dict.fromkeys(line.part for line in short):
        own = [line for line in short if line.part == part]
        names = list(dict.fromkeys(line.form for line in own))
        yield f"\n{part}, us".ljust(48) + "".join(f"{name:>{WIDTH}}" for name in ("floor", *names))
        for case in dict.fromkeys(line.case for line in own):
            yield _row(case, [line for line in own if line.case == case], names)


def _row(case: str, lines: Sequence[Line], names: Sequence[str]) -> str:
    found = {line.form: _cell(line) for line in lines}
    floors = (f"{line.floor_us:.1f}" for line in lines if line.floor_us is not None)
    cells = [next(floors, ""), *(found.get(name, "") for name in names)]
    return (case.ljust(47) + "".join(f"{cell:>{WIDTH}}" for cell in cells)).rstrip()


def _cell(line: Line) -> str:
    return f"{line.us:.1f}" if line.floor_us is None else f"{line.us:.1f} {line.us / line.floor_us:6.2f}"

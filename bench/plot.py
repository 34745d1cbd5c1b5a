"""A line chart as an SVG file, without any library."""

from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 460, 300, 60, 45, 30
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")
Points = Sequence[tuple[float, float]]


def line_charts(path: Path, charts: Mapping[str, Mapping[str, Points]], y_label: str) -> None:
    """One chart for each title, side by side; each has named lines of (x, y)."""
    panels = [_panel(i * WIDTH, title, lines, y_label) for i, (title, lines) in enumerate(charts.items())]
    size = f'width="{WIDTH * len(charts)}" height="{HEIGHT}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    path.write_text(f"{start}{''.join(panels)}</svg>\n")


def _panel(offset: int, title: str, lines: Mapping[str, Points], y_label: str) -> str:
    points = [point for line in lines.values() for point in line]
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    top = 1.1 * max(y for _, y in points)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - low) / ((high - low) or 1.0) * (WIDTH - LEFT - 30)
        return offset + LEFT + across, HEIGHT - BOTTOM - y / top * (HEIGHT - BOTTOM - TOP)

    parts = [_text(offset + WIDTH / 2, 18, title), _text(offset + 14, HEIGHT / 2, y_label, turned=True)]
    parts += [_text(at(x, 0)[0], HEIGHT - BOTTOM + 18, f"{x:g}") for x in sorted({x for x, _ in points})]
    parts += [_text(offset + LEFT - 22, at(low, y)[1] + 4, f"{y:.2f}") for y in (0.0, top / 2, top)]
    parts.append(_polyline([at(low, top), at(low, 0), at(high, 0)], "#888"))
    for i, (name, line) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        parts.append(_polyline([at(x, y) for x, y in line], colour))
        parts.append(_text(offset + LEFT + 70 + 130 * i, HEIGHT - 8, name, colour))
    return "".join(parts)


def _polyline(points: Points, colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _text(x: float, y: float, text: str, colour: str = "#222", turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.0f} {y:.0f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" text-anchor="middle" fill="{colour}"{turn}>{text}</text>'

"""Prints the largest files and functions; fails over the limits of the house style. Run by `make check`."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("server", "scheduler", "spec", "model", "kernels", "train", "bench", "tests")
MAX_FILE, MAX_FUNCTION, SHOWN = 500, 60, 8


def sources() -> list[Path]:
    return sorted(p for f in FOLDERS for p in (ROOT / f).rglob("*") if p.suffix in {".py", ".cpp"})


def functions(path: Path) -> Iterator[tuple[int, str]]:
    """Lines (decorators and docstring included) and the place of every function of a Python file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield (node.end_lineno or first) - first + 1, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def show(title: str, rows: list[tuple[int, str]], limit: int) -> bool:
    """Prints the longest rows; True when one is over the limit."""
    print(f"{title} (limit {limit} lines)")
    ordered = sorted(rows, reverse=True)
    for lines, name in ordered[:SHOWN]:
        print(f"{lines:6} {name}{'   TOO LONG' if lines > limit else ''}")
    return any(lines > limit for lines, _ in rows)


def main() -> int:
    files = sources()
    lines = [(len(p.read_text().splitlines()), str(p.relative_to(ROOT))) for p in files]
    print(f"{len(files)} files, {sum(n for n, _ in lines)} lines")
    found = [f for p in files if p.suffix == ".py" for f in functions(p)]
    too_long = [show("files", lines, MAX_FILE), show("functions", found, MAX_FUNCTION)]
    return int(any(too_long))


if __name__ == "__main__":
    sys.exit(main())

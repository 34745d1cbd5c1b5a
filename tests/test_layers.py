"""Imports point one way, and a few names belong to one place (the design's layout section)."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEVEL = {"kernels": 0, "model": 1, "spec": 2, "scheduler": 3, "train": 4, "bench": 4, "server": 5}
HTTP = ("server", "bench")  # bench is a client of the running server, over a socket
OWNERS = {
    "asyncio": (*HTTP, "scheduler/async_engine.py"),
    "fastapi": ("server",),
    "starlette": ("server",),
    "uvicorn": ("server",),
    "httpx": HTTP,
}
FILES = [p for folder in LEVEL for p in sorted((ROOT / folder).rglob("*.py"))]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_point_down(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    for module in imports(path):
        top, *rest = module.split(".")
        if top == "verdraft" and rest and rest[0] in LEVEL:
            assert rest[0] == folder or LEVEL[rest[0]] < LEVEL[folder], f"{name(path)} imports {module}"
        if top in OWNERS:
            assert name(path).startswith(OWNERS[top]), f"{name(path)} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_accelerator_libraries_are_named_by_kernels_alone(path: Path) -> None:
    found = re.search(r"\b(triton|flash_attn)\b", path.read_text())
    assert found is None or path.is_relative_to(ROOT / "kernels"), f"{name(path)} names {found and found[0]}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_import_cycle_is_hidden(path: Path) -> None:
    assert "TYPE_CHECKING" not in path.read_text(), f"{name(path)}: move the type down instead"


def test_packages_are_symlinks_without_init() -> None:
    links = {p.name: p.readlink().as_posix() for p in (ROOT / "src/verdraft").iterdir() if p.is_symlink()}
    assert links == {folder: f"../../{folder}" for folder in LEVEL}
    assert not [name(p) for p in FILES if p.name == "__init__.py"]

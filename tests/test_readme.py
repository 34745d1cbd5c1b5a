"""The README's lists are those of the code."""

import re
from pathlib import Path

import pytest

from verdraft.server.settings import Settings, flag

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_settings_table_is_complete() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+|MODEL)` \| (?:`(.*)` )?\| (.+) \|$", README, re.MULTILINE)
    fields = {("MODEL" if name == "model" else flag(name)): field for name, field in Settings.model_fields.items()}
    expected = [(name, "" if f.default is None else str(f.default), f.description) for name, f in fields.items()]
    assert rows == expected


@pytest.mark.parametrize("target", re.findall(r"`make ([a-z]+)", README))
def test_every_named_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", re.findall(r"`(docker/[\w.]+)`", README))
def test_every_named_file_exists(path: str) -> None:
    assert (ROOT / path).is_file()


@pytest.mark.demo
def test_the_offline_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "LLM()" in block)
    exec(compile(example, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 20

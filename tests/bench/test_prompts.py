"""Reading and mixing prompts."""

import argparse
import json
import random
from pathlib import Path

import pytest

from verdraft.bench.prompts import DataError, add_data_flags, load, mixed, prompts_of


def line(number: int, workload: str, content: str = "Hi.") -> str:
    messages = [{"role": "user", "content": content, "name": "x"}]
    return json.dumps({"id": f"{workload}-{number}", "workload": workload, "messages": messages, "max_tokens": 9})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("".join(line(i, "chat") + "\n" for i in range(3)))
    (tmp_path / "b.jsonl").write_text(line(0, "sql") + "\n" + line(1, "sql", "long" * 9000) + "\n")
    return tmp_path


def flags(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_data_flags(parser)
    return parser.parse_args(words)


def test_a_line_becomes_a_prompt(data: Path) -> None:
    first = load(str(data))[0]
    assert (first.id, first.workload, first.max_tokens) == ("chat-0", "chat", 9)
    assert first.messages == ({"role": "user", "content": "Hi."},)
    assert first.num_chars == 3


def test_workloads_take_turns(data: Path) -> None:
    order = [p.workload for p in mixed(load(str(data)), random.Random(1))]
    assert order == ["chat", "sql", "chat", "sql", "chat"]


def test_flags_choose(data: Path) -> None:
    assert {p.workload for p in prompts_of(flags("--data", str(data), "--workloads", "sql"))} == {"sql"}
    assert len(prompts_of(flags("--data", str(data)))) == 4  # the long one is left out
    same = [prompts_of(flags("--data", str(data), "--seed", "5")) for _ in range(2)]
    assert same[0] == same[1]


def test_the_default_folder_is_the_environments(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERDRAFT_DATA", str(data))
    assert len(prompts_of(flags())) == 4


def test_bad_data_is_named(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERDRAFT_DATA", raising=False)
    with pytest.raises(DataError, match="VERDRAFT_DATA"):
        prompts_of(flags())
    with pytest.raises(DataError, match="fits --workloads"):
        prompts_of(flags("--data", str(data), "--workloads", "none"))
    (tmp_path / "c.jsonl").write_text('{"id": "x"}\n')
    with pytest.raises(DataError, match=r"c\.jsonl line 1"):
        load(str(tmp_path))

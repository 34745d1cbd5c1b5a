"""The load generator against a small server of the same stream format."""

import argparse
from pathlib import Path

import httpx
import pytest

from verdraft.bench.client import BadAnswer, stream_chat
from verdraft.bench.load import Load, form_of, markdown, report_of
from verdraft.bench.prompts import Prompt

PROMPTS = [
    Prompt(f"p{i}", "chat" if i % 2 else "sql", ({"role": "user", "content": "hello" * 2},), 8) for i in range(5)
]


def body(**more: object) -> dict[str, object]:
    return {"messages": list(PROMPTS[0].messages), "max_tokens": 5, "cache_salt": "x", **more}


async def test_one_streamed_answer(client: httpx.AsyncClient) -> None:
    answer = await stream_chat(client, body())
    assert answer.ids == [104, 101, 108, 108, 111]
    assert answer.prompt_ids == [1, 2, 3, 4]
    assert answer.num_decoded == 3
    assert (answer.cached_tokens, answer.num_spec_steps, answer.num_accepted) == (1, 2, 3)
    assert answer.finish == "stop"
    assert 0 < answer.ttft <= answer.ttft + answer.decode_time


@pytest.mark.parametrize(
    ("mode", "message"),
    [("failing", "error event"), ("cut", r"without \[DONE\]"), ("unknown", "400: .*no such mode")],
)
async def test_a_bad_answer_is_an_error(client: httpx.AsyncClient, mode: str, message: str) -> None:
    with pytest.raises(BadAnswer, match=message):
        await stream_chat(client, body(speculation=mode))


async def test_every_cell_answers_every_prompt(client: httpx.AsyncClient) -> None:
    load = Load(client, ["off", "suffix"], max_tokens=6)
    cells = await load.run(PROMPTS, [1, 2])
    assert [(c.concurrency, c.mode) for c in cells] == [(1, "off"), (1, "suffix"), (2, "off"), (2, "suffix")]
    assert all([len(a.ids) for a in c.answers] == [6] * 5 for c in cells)
    assert all(c.wall > 0 and c.workloads == [p.workload for p in PROMPTS] for c in cells)
    assert load.mismatches == []


async def test_answers_by_a_schema(client: httpx.AsyncClient, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    load = Load(client, ["off"], 6, form=form_of(str(tmp_path / "schema.json")))
    cells = await load.run(PROMPTS, [1])
    assert [bytes(a.ids) for a in cells[0].answers] == [b"object"] * 5


async def test_a_mode_that_changes_tokens_is_caught(client: httpx.AsyncClient) -> None:
    load = Load(client, ["off", "broken"], max_tokens=6)
    cells = await load.run(PROMPTS, [1])
    assert {m.prompt for m in load.mismatches} == {p.id for p in PROMPTS}
    assert {m.mode for m in load.mismatches} <= {"off", "broken"}  # the first answer of a prompt is the measure
    assert {m.at for m in load.mismatches} == {1}
    report = report_of(argparse.Namespace(out="x"), load, cells, {"verdraft": 3 << 20})
    assert len(report["mismatches"]) == 5
    assert "verdraft 3 MiB" in markdown(report)
    assert "Answers that differ between modes: 5." in markdown(report)

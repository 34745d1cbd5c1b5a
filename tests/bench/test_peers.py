"""The arithmetic of the comparison with peers, its prompts, and the program that peers are asked through."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from verdraft.bench.client import BadAnswer
from verdraft.bench.peer_gguf import write_floats
from verdraft.bench.peer_kinds import NAMES, PipePeer, kinds
from verdraft.bench.peer_prompts import peer_prompts
from verdraft.bench.peer_report import Round, Row, Timing, best_table, markdown, table, uneven_prompts
from verdraft.bench.peers import PER_ROUND, plan

TASKS = ["chat", "prefill", "8"]
ECHO = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["max_tokens"] == 0:
        break
    print(json.dumps([{"prompt_tokens": len(p), "num_tokens": request["max_tokens"]} for p in request["prompts"]]))
    sys.stdout.flush()
"""


def row(peer: str, speculation: str, speed: float) -> Row:
    """At speed 1: 2 tokens/s of decoding, 10 of prefill, 5 of all streams."""
    single = Round([Timing(20, 5, ttft=2 / speed, decode_time=2 / speed)], wall=4 / speed)
    batch = Round([Timing(20, 10), Timing(20, 15)], wall=5 / speed)
    return Row(peer, speculation, "float32", {"chat": [single, single], "prefill": [single], "8": [batch]})


@pytest.fixture
def rows() -> list[Row]:
    lookup = row("other", "lookup", 1.0)
    del lookup.rounds["8"]
    return [row("verdraft", "none", 1.0), row("verdraft", "suffix", 3.0), row("other", "none", 1.5), lookup]


def test_rates_are_weighted_by_time(rows: list[Row]) -> None:
    assert [rows[0].value(t) for t in TASKS] == [2.0, 10.0, 5.0]
    rows[0].rounds["chat"].append(Round([Timing(20, 13, 1.0, 2.0)], 3.0))
    assert rows[0].value("chat") == pytest.approx((4 + 4 + 12) / 6)
    assert rows[0].summary()["tasks"]["chat"]["by_round"] == [2.0, 2.0, 6.0]


def test_what_was_not_measured_is_zero(rows: list[Row]) -> None:
    assert rows[3].value("8") == 0
    assert Row("other", "none", "").value("edit") == 0


def test_ratios_are_to_verdraft(rows: list[Row]) -> None:
    assert table([rows[0], rows[2]], TASKS).splitlines()[2:] == [
        "| verdraft | none | 2.0 | 10.0 | 5.0 |",
        "| other | none | 3.0 (1.50x) | 15.0 (1.50x) | 7.5 (1.50x) |",
    ]
    assert table([rows[1], rows[3]], TASKS).splitlines()[3] == "| other | lookup | 2.0 (0.33x) | 10.0 (0.33x) | - |"
    assert table([rows[2]], ["chat"]).splitlines()[2] == "| other | none | 3.0 |"


def test_the_best_of_both_sides_meet(rows: list[Row]) -> None:
    assert best_table(rows, TASKS).splitlines()[2:] == [
        "| chat, decode tokens/s | 6.0 (suffix) | other: 3.0 (none) | 2.00x |",
        "| prefill tokens/s | 30.0 (suffix) | other: 15.0 (none) | 2.00x |",
        "| 8 streams, total tokens/s | 15.0 (suffix) | other: 7.5 (none) | 2.00x |",
    ]
    assert len(best_table(rows[:2], TASKS).splitlines()) == 2


def test_prompts_of_another_length_are_reported(rows: list[Row]) -> None:
    assert uneven_prompts(rows) == uneven_prompts([]) == []
    rows[2].rounds["prefill"] = [Round([Timing(21, 5, 1, 1)], 1)]
    assert uneven_prompts(rows) == ["other (none), prefill"]
    rows[3].failures.append("it fell over")
    text = markdown({"machine": {"cores": 2}, "uneven_prompts": uneven_prompts(rows)}, rows, TASKS)
    assert "cores 2" in text
    assert "- prompts of another length than verdraft's: other (none), prefill" in text
    assert "- other, speculation lookup failed: it fell over" in text


def test_every_round_has_prompts_of_its_own() -> None:
    prompts = peer_prompts("")
    first, second = plan(prompts, 0), plan(prompts, 1)
    for task, count in PER_ROUND.items():
        assert len(first[task]) == len(second[task]) == count
        assert all(p not in first[task] for p in second[task])
    assert len({str(p) for p in prompts.streams}) == prompts.num_streams >= 16
    assert plan(prompts, 1000)["chat"]


def test_every_peer_is_known_by_name() -> None:
    assert {k.peer for k in kinds()} == set(NAMES)
    assert kinds()[0].peer == "verdraft"
    assert len({(k.peer, k.speculation) for k in kinds()}) == len(kinds())


@pytest.fixture
def echo() -> Iterator[PipePeer]:
    command = [sys.executable, "-c", ECHO]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield PipePeer(process)


async def test_a_program_is_asked_in_lines(echo: PipePeer) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    assert await echo.ask([chat, chat * 2], 3, True) == [Timing(1, 3), Timing(2, 3)]
    with pytest.raises(BadAnswer, match="has ended"):
        await echo.ask([chat], 0, False)


def test_a_quantised_file_becomes_floats(tmp_path: Path) -> None:
    values = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
    packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "q8.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("token_embd.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_floats(tmp_path / "q8.gguf", tmp_path / "f16.gguf", "float16")
    reader = gguf.GGUFReader(tmp_path / "f16.gguf")
    matrix, vector = reader.tensors
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert np.array_equal(matrix.data, gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0).astype(np.float16))
    assert np.array_equal(vector.data, values[0])

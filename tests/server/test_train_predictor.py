"""`verdraft train predictor` from flags and files to a predictor that loads."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from verdraft.bench.prompts import DataError
from verdraft.bench.traces import TraceReader
from verdraft.server.build import build_text
from verdraft.server.cli import main
from verdraft.server.train_predictor import coder_of
from verdraft.spec.predictor import load_predictor
from verdraft.spec.replay import RecordedAnswer

EOS = 7


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Ten conversations of two answers, three answers as ids, a shard of two sequences."""
    folder = tmp_path / "data"
    folder.mkdir()
    said = "the cat, the dog (and the bird) 12 times. " * 3
    turns = [{"role": "user", "content": said}, {"role": "assistant", "content": said + "the end"}]
    lines = [{"id": f"c{i}", "workload": "edit", "messages": turns + turns} for i in range(10)]
    (folder / "talk.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ids = [{"prompt": [1, 2, 3, i], "output": [1, 2, 3, 4, end]} for i, end in enumerate((EOS, 9, EOS))]
    (folder / "ids.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ids))
    own = np.array([0, 0, 1, 1, 0, 1, 1, 1], bool)
    tokens = np.array([1, 2, 3, EOS, 4, 5, 6, 8], np.int32)
    columns = {"sequence": np.array([0] * 4 + [1] * 4, np.int32), "next": tokens, "own": own}
    (folder / "own").mkdir()
    save_file(columns, folder / "own" / "train-0000.safetensors")
    (folder / "own" / "sources.json").write_text(json.dumps({"train": ["chat", "shell"]}))
    return folder


def reader(model_path: Path, data: Path, longest: int = 8192, without: tuple[str, ...] = ()) -> TraceReader:
    return TraceReader(data, coder_of(build_text(model_path, frozenset({EOS}))), longest, without)


def answers(read: TraceReader, name: str) -> list[RecordedAnswer]:
    return [answer for file in read.files if file.stem == name for answer in read.read(file)]


def test_every_turn_of_the_assistant_is_an_answer_behind_what_came_before(model_path: Path, data: Path) -> None:
    read = reader(model_path, data)
    talk = answers(read, "talk")
    decode = build_text(model_path, frozenset()).tokenizer.decode
    assert len(talk) == 20
    assert talk[0].output == talk[1].output
    assert talk[0].output[-1] == EOS
    assert decode(talk[0].output[:-1], show_special=True).endswith("the end")
    assert decode(talk[1].prompt, show_special=True).count("the end") == 1
    assert [a.held_out for a in talk[::2]] == [False] * 4 + [True] + [False] * 4 + [True]
    assert talk[0].conversation == talk[1].conversation != talk[2].conversation


def test_ids_and_shards_are_read_as_they_are(model_path: Path, data: Path) -> None:
    read = reader(model_path, data)
    assert answers(read, "ids")[1] == RecordedAnswer("ids", "ids 2", (1, 2, 3, 1), (1, 2, 3, 4, 9), ended=False)
    assert answers(read, "train-0000") == [
        RecordedAnswer("own", "own train 0", (1, 2), (3, EOS), True, True),
        RecordedAnswer("own", "own train 1", (4,), (5, 6, 8), False, False),
    ]


def test_what_is_unwanted_or_too_long_is_left_out(model_path: Path, data: Path) -> None:
    read = reader(model_path, data, without=("edit", "ids", "shell"))
    assert [file.stem for file in read.files] == ["train-0000", "talk"]
    assert [a.conversation for file in read.files for a in read.read(file)] == ["own train 0"]
    first, second = answers(reader(model_path, data), "talk")[:2]
    longest = len(first.prompt + first.output)
    assert len(second.prompt + second.output) > longest
    assert len(answers(reader(model_path, data, longest), "talk")) == 10


def test_the_command_writes_a_predictor_and_its_calibration(
    model_path: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "predictor.safetensors"
    flags = ["--epochs", "2", "--batch", "64", "--without", "own"]
    main(["train", "predictor", str(model_path), "--data", str(data), "--out", str(out), *flags])
    record = load_predictor(out).record
    assert (record["recipe"]["epochs"], record["recipe"]["batch"], record["recipe"]["seed"]) == (2, 64, 42)
    assert {quality["workload"] for quality in record["held_out"]} == {"edit", "all"}
    said = capsys.readouterr().out
    assert "precision" in said
    assert "l =  4" in said
    assert out.with_suffix(".svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lr", "0"], "argument --lr: expected a positive number, got '0'"),
        (["--epochs", "x"], "argument --epochs: expected a positive integer, got 'x'"),
        (["--data", "/nowhere"], "--data must name a folder with *.jsonl or *.safetensors files, not '/nowhere'"),
        (["--without", "talk,ids,own"], "--data holds too few conversations to learn from some and judge by others"),
    ],
)
def test_mistakes_are_one_line(
    model_path: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    command = ["train", "predictor", str(model_path), "--data", str(data), "--out", str(tmp_path / "p"), *flags]
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("line", ['{"messages": 3}', '{"prompt": [1]}', "[1]", "no json", '{"messages": [{}]}'])
def test_a_damaged_line_is_named(model_path: Path, data: Path, line: str) -> None:
    (data / "talk.jsonl").write_text("\n" + line + "\n")
    with pytest.raises(DataError, match=r"talk\.jsonl line 2: expected `messages`"):
        answers(reader(model_path, data), "talk")


def test_a_damaged_shard_is_named(model_path: Path, data: Path) -> None:
    (data / "own" / "train-0000.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"train-0000\.safetensors: expected columns"):
        answers(reader(model_path, data), "train-0000")

"""`verdraft train exits` from flags and files to heads, on a small random model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from verdraft.kernels.chooser import choose_kernels
from verdraft.model.eagle_file import load_eagle
from verdraft.model.exit_file import load_exits
from verdraft.model.load import load_model
from verdraft.server.build import build_text
from verdraft.server.cli import main
from verdraft.server.train_data import read_prompts
from verdraft.train.prompts import DataError

CPU = torch.device("cpu")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Six prompts, two recorded conversations, one text."""
    folder = tmp_path / "data"
    folder.mkdir()
    asked = [[{"role": "user", "content": f"the question {i}"}] for i in range(6)]
    recorded = [[{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "the"}] for i in range(2)]
    for name, conversations in (("asked", asked), ("recorded", recorded)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in conversations))
    (folder / "text.txt").write_text("the other thing, then the rest. " * 60)
    return folder


def test_prompts_are_held_out_by_conversation(model_path: Path, data: Path) -> None:
    prompts = read_prompts(data, build_text(model_path, frozenset()))
    asked = [p for p in prompts if p.source == "asked"]
    assert [sum(p.held_out for p in asked), len(asked)] == [3, 6]
    assert {p.asked for p in asked} == {True}
    recorded = [p for p in prompts if p.source == "recorded"]
    assert [(p.asked, p.held_out) for p in recorded] == [(False, False)] * 2
    assert len([p for p in prompts if p.source == "text"]) == 3
    assert len({p.ids for p in asked}) == 6
    assert prompts == read_prompts(data, build_text(model_path, frozenset()))
    assert prompts != read_prompts(data, build_text(model_path, frozenset()), seed=1)


def test_a_recorded_answer_is_not_part_of_the_prompt(model_path: Path, data: Path) -> None:
    text = build_text(model_path, frozenset())
    recorded = next(p for p in read_prompts(data, text) if p.source == "recorded")
    assert text.tokenizer.decode(recorded.ids, show_special=True) in (
        "User: say 0\n\nAssistant:",
        "User: say 1\n\nAssistant:",
    )


def test_the_command_writes_heads_that_load(
    model_path: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ["--layers", "1,2", "--vocabulary", "32", "--inner", "16", "--tokens", "50", "--epochs", "1"]
    main(["train", "exits", str(model_path), "--data", str(data), "--out", str(out), *flags])
    model = load_model(model_path, choose_kernels("cpu", CPU, torch.float32), torch.float32, CPU)
    assert load_exits(out, model, model_path).bounds(4) == (0, 1, 2, 4)
    record = json.loads((out / "exits.json").read_text())["training"]
    assert record["prompts"]["asked"] == 3
    assert '"agreement"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--layers", "2"], "--layers: expected at least two layers"),
        (["--layers", "2,x"], "expected a positive integer, got 'x'"),
        (["--layers", "2,9"], "exits: expected two layers in ascending order from 1 to 3, got 2,9"),
        (["--data", "/nowhere"], "--data must name a folder with *.jsonl or *.txt files, not '/nowhere'"),
    ],
)
def test_mistakes_are_one_line(
    model_path: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], message: str
) -> None:
    flags = ["--data", str(data), "--layers", "1,2", "--out", str(tmp_path / "out"), *change]
    with pytest.raises(SystemExit) as stopped:
        main(["train", "exits", str(model_path), *flags])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_damaged_line_is_named(model_path: Path, data: Path) -> None:
    (data / "asked.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(DataError, match=r"asked\.jsonl line 1: expected a conversation in `messages`"):
        read_prompts(data, build_text(model_path, frozenset()))


def test_an_eagle_head_is_trained_by_a_command_too(
    tiny_model: Callable[..., Path], model_path: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tiny_model("Llama", num_hidden_layers=7), tmp_path / "out"
    shutil.copy(model_path / "tokenizer.json", path)
    flags = [
        "--vocabulary",
        "32",
        "--inner",
        "16",
        "--tokens",
        "50",
        "--epochs",
        "1",
        "--unroll",
        "2",
        "--threads",
        "1",
    ]
    main(["train", "eagle", str(path), "--data", str(data), "--out", str(out), *flags])
    model = load_model(path, choose_kernels("cpu", CPU, torch.float32), torch.float32, CPU)
    assert len(load_eagle(out, model, path).token_ids) == 32
    assert '"acceptance"' in capsys.readouterr().out

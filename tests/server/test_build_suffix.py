"""From settings to the stores' keeper, and `verdraft train suffix` from recorded answers to a file that it reads."""

import json
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from verdraft.scheduler import keeping
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.keeping import SuffixKeeper
from verdraft.server.build import build_engine
from verdraft.server.build_suffix import keepers
from verdraft.server.cli import main
from verdraft.server.settings import Settings, SettingsError
from verdraft.spec.suffix_index import ending

PROMPT, ANSWER = [5, 6, 7, 8], list(range(20, 40))


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path], byte_level_folder: Path) -> Path:
    folder = tiny_model("Llama")
    shutil.copy(byte_level_folder / "tokenizer.json", folder)
    return folder


def build(model: Path, file: Path | None) -> tuple[Engine, tuple[SuffixKeeper, ...]]:
    settings = Settings(kv_blocks=32, threads=1, device="cpu", suffix_cache=file)
    engine = build_engine(settings, model)
    return engine, keepers(engine, 320, settings, model)


def test_nothing_is_kept_unless_asked(model: Path) -> None:
    assert build(model, None)[1] == ()


def test_a_file_is_written_meanwhile_and_read_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "answers"
    monkeypatch.setattr(keeping, "SAVE_SECONDS", 0.01)
    engine, (keeper,) = build(model, file)
    keeper.start()
    engine.drafting.stores.of("").add(PROMPT, ANSWER)
    deadline = time.monotonic() + 20
    while build(model, file)[0].drafting.stores.num_tokens == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.drafting.stores.of("tenant").add(PROMPT, ANSWER)
    keeper.close()
    again = build(model, file)[0].drafting.stores
    end = ending(PROMPT)
    assert [again.of(salt).propose(end, 4).tokens for salt in ("", "tenant", "x")] == [(20, 21, 22, 23)] * 2 + [()]


def test_a_damaged_file_is_moved_aside_with_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "answers"
    file.write_bytes(b"\0" * 100)
    with caplog.at_level(logging.WARNING, logger="verdraft.suffix"):
        engine, (keeper,) = build(model, file)
    assert "starting without it" in caplog.text
    assert (tmp_path / "answers.unread").read_bytes() == b"\0" * 100
    engine.drafting.stores.of("").add(PROMPT, ANSWER)
    keeper.write()
    assert build(model, file)[0].drafting.stores.num_tokens > 0


def test_what_cannot_be_written_is_logged_and_nothing_more(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "answers.partial").mkdir()
    _, (keeper,) = build(model, tmp_path / "answers")
    keeper.write()
    assert "cannot be kept" in caplog.text


def test_a_link_stays_a_link(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "answers")
    engine, (keeper,) = build(model, tmp_path / "link")
    engine.drafting.stores.of("").add(PROMPT, ANSWER)
    keeper.write()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "answers").is_file()


@pytest.mark.parametrize("name", ["nowhere/answers", ".", "/dev/null"])
def test_a_place_that_cannot_be_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="--suffix-cache"):
        build(model, tmp_path / name)


def test_recorded_answers_warm_a_store(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, data = tmp_path / "answers", tmp_path / "data"
    data.mkdir()
    (data / "ids.jsonl").write_text(json.dumps({"prompt": PROMPT, "output": ANSWER}) + "\n")
    main(["train", "suffix", str(model), "--data", str(data), "--out", str(file)])
    assert capsys.readouterr().out == "1 answers, 25 tokens kept\n"
    assert build(model, file)[0].drafting.stores.of("").propose(ending(PROMPT), 3).tokens == (20, 21, 22)
    with pytest.raises(SystemExit):
        main(["train", "suffix", str(model), "--data", str(data), "--out", str(tmp_path / "no" / "where")])
    assert "--out: cannot write" in capsys.readouterr().err

"""The GPU benchmark, rehearsed on the CPU: every part runs and is written down."""

import json
from pathlib import Path

import pytest

from verdraft.bench.gpu import main


def test_a_rehearsal_runs_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rehearse", "--layers", "2", "--out", str(tmp_path / "out.json")])
    result = json.loads((tmp_path / "out.json").read_text())
    parts = {line["part"] for line in result["lines"]}
    assert parts | {"sampling"} == {"attention", "products", "passes", "sampling"}
    assert ("sampling" in parts) is not any("sampling on cpu" in note for note in result["notes"])
    assert all(line["us"] > 0 for line in result["lines"])
    assert result["device"] == "cpu"
    assert "GB/s" in capsys.readouterr().out


def test_what_there_is_no_time_for_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rehearse", "--seconds", "0", "--out", str(tmp_path / "out.json")])
    assert len(json.loads((tmp_path / "out.json").read_text())["lines"]) == 1
    assert "# no time for attention with torch and what follows" in capsys.readouterr().out


def test_without_a_gpu_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "out.json")])
    assert not (tmp_path / "out.json").exists()

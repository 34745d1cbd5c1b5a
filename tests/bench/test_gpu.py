"""The GPU script and its benchmark, rehearsed on the CPU: every part runs and is written down, none stops another."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from verdraft.bench.gpu import main
from verdraft.bench.gpu_engine import MODES
from verdraft.bench.gpu_form import Form
from verdraft.bench.gpu_jobs import LEAST, PARTS, Job, Result, Setting, plan, run
from verdraft.bench.gpu_meter import Line
from verdraft.bench.gpu_parts import REHEARSAL
from verdraft.bench.gpu_table import table

ROOT = Path(__file__).resolve().parents[2]
SETTING = Setting(torch.device("cpu"), REHEARSAL)
CPU = Form("cpu")


def test_the_whole_script_runs(tmp_path: Path) -> None:
    """What one call on a GPU does, with the smallest case of every check."""
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path)}
    script = [ROOT / "tests/gpu/run.sh", "--device", "cpu"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    checks = (tmp_path / "checks.txt").read_text()
    assert checks.count(" passed in ") == 3
    assert "tiny, cpu: answers of 8 that changed" in checks
    assert "ended with" not in checks
    result = json.loads((tmp_path / "timings.json").read_text())
    assert result["notes"] == []
    assert {line["part"] for line in result["lines"]} == set(PARTS)
    assert all(line["us"] > 0 for line in result["lines"])
    cases = [line["case"] for line in result["lines"]]
    assert {f"{mode}, 8 requests{how}" for mode in MODES for how in ("", ", recorded")} <= set(cases)
    short = done.stdout.split("== in short")[1].splitlines()
    assert short[-1].split()[:2] == ["8", "rows"]
    assert done.stdout.count("sampling, us") == 1


def test_a_part_that_fails_or_takes_too_long_costs_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endless = replace(SETTING, sizes=replace(REHEARSAL, config=replace(REHEARSAL.config, num_layers=5000)))
    out = tmp_path / "out.json"
    result = Result(out, "cpu")
    run([Job("attention", Form("flash"), 60)], SETTING, 60, result)
    assert json.loads(out.read_text())["notes"] == [
        "attention with flash ended: KernelUnavailable: kernels: flash cannot run float32 on cpu: needs an NVIDIA GPU"
    ]
    run([Job("passes", CPU, LEAST)], endless, 60, result)
    run([Job("products", CPU, 60)], SETTING, 60, result)
    run([Job("sampling", CPU, 60)], SETTING, LEAST / 2, result)
    found = json.loads(out.read_text())
    assert found["notes"][1:] == ["passes with cpu: stopped after 2 s", "no time for sampling with cpu"]
    assert [line["case"] for line in found["lines"]] == ["1 rows", "6 rows"]
    assert "# no time for sampling with cpu" in capsys.readouterr().out


def test_what_matters_most_is_measured_first() -> None:
    exact = Form("triton", deterministic=True)
    forms = [Form("flash"), Form("triton"), Form("torch"), exact]
    forms += [Form("flash", "int8"), Form("flash", "fp8")]
    jobs = list(plan(forms))
    assert [str(job) for job in jobs[:3]] == ["floor with flash", "passes with flash", "engine with flash"]
    assert {job.part for job in jobs if job.form == exact} == {"attention", "products", "passes", "engine"}
    assert {job.form for job in jobs if job.part == "attention"} == {*forms[:4]}
    assert {job.part for job in jobs if job.form == forms[-1]} == {"products", "passes", "engine"}
    assert len(jobs) == len(set(jobs))


def test_the_table_has_a_column_for_every_form() -> None:
    lines = [Line("passes", "a", "1 rows", 2.0, 1.5, True), Line("passes", "b", "2 rows", 3.0, None, True)]
    found = [row.split() for row in table([*lines, Line("passes", "c", "3 rows", 1.0)])]
    assert found == [["passes,", "us", "floor", "a", "b"], ["1", "rows", "1.5", "2.0", "1.33"], ["2", "rows", "3.0"]]


def test_without_a_gpu_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "out.json")])
    assert not (tmp_path / "out.json").exists()

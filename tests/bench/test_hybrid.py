"""The live comparison: arms that share model and memory, what is counted, and that a wrong answer is no result."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from verdraft.bench.hybrid import Bench, report
from verdraft.kernels.chooser import choose_kernels
from verdraft.model.exit_head import own_exits
from verdraft.model.load import load_model
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.engine import Engine

PROMPTS = [[5, 6, 7, 8] * 3, [9, 10, 11], [12, 13, 14, 15, 16]]


@pytest.fixture
def bench(deep_agreeing_path: Path) -> Bench:
    cpu = torch.device("cpu")
    model = load_model(deep_agreeing_path, choose_kernels("cpu", cpu, torch.float32), torch.float32, cpu)
    config = EngineConfig(max_model_len=64, num_blocks=16, max_num_seqs=2)
    arms = ("off", "early_exit", "payoff")
    return Bench({arm: Engine(model, config, exits=own_exits(model, (1, 2))) for arm in arms}, max_tokens=20)


def test_every_arm_answers_every_prompt_and_drafts_save_cycles(bench: Bench) -> None:
    found = bench.cells("w", PROMPTS, streams=2)
    assert {cell.tokens for cell in found.values()} == {60}
    assert found["off"].cycles == 3 * 19
    assert (found["off"].accepted, found["off"].accepted_len) == (0, 1.0)
    for arm in ("early_exit", "payoff"):
        assert found[arm].cycles + found[arm].accepted == 3 * 19
        assert found[arm].accepted_len > 1.5
        assert found[arm].cycles_per_thousand < found["off"].cycles_per_thousand


def test_an_answer_that_differs_is_an_error(bench: Bench, deep_llama_path: Path) -> None:
    cpu = torch.device("cpu")
    other = load_model(deep_llama_path, choose_kernels("cpu", cpu, torch.float32), torch.float32, cpu)
    bench.engines["suffix"] = Engine(other, bench.engines["off"].config)
    with pytest.raises(RuntimeError, match="suffix"):
        bench.cells("w", PROMPTS[:1], streams=1)


def test_the_report_has_a_row_for_each_workload_and_one_for_all(bench: Bench) -> None:
    args = Namespace(arms=list(bench.engines), streams=[1, 2], prompts=1)
    lines = [line.split() for line in report(args, bench, {"chat": PROMPTS[:2], "edit": PROMPTS[2:]})]
    assert [line[0] for line in lines] == [
        "1",
        "workload",
        "chat",
        "edit",
        "all",
        "2",
        "workload",
        "chat",
        "edit",
        "all",
    ]
    assert all(line[2] == "1.00x" for line in lines if line[0] in ("chat", "edit", "all"))

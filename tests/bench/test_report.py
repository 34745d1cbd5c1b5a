"""The arithmetic of the load report, on answers small enough to check by hand."""

import pytest

from verdraft.bench.client import Answer
from verdraft.bench.report import Cell, first_difference, main_table, rate, workload_table


def answer(num_tokens: int, ttft: float, decode_time: float, **more: int) -> Answer:
    """`num_tokens` after a prompt of 10, the first alone in its chunk."""
    return Answer([0] * 10, [7] * num_tokens, ttft, decode_time, num_tokens - 1, **more)


@pytest.fixture
def cells() -> list[Cell]:
    plain = Cell("off", 1, [answer(5, 0.5, 2.0), answer(9, 0.3, 2.0)], ["chat", "code"], wall=5.0)
    drafts = [answer(5, 0.5, 2.0), answer(9, 0.3, 1.0, num_spec_steps=2, num_accepted=5, cached_tokens=4)]
    return [plain, Cell("suffix", 1, drafts, ["chat", "code"], wall=4.0)]


def test_rates_are_weighted_by_time(cells: list[Cell]) -> None:
    assert cells[0].decode_rate == pytest.approx((4 + 8) / 4.0)
    assert cells[1].decode_rate == pytest.approx((4 + 8) / 3.0)
    assert cells[0].total_rate == pytest.approx(14 / 5.0)
    assert cells[0].ttft == pytest.approx(0.4)


def test_cached_prompt_tokens_are_no_prefill(cells: list[Cell]) -> None:
    assert cells[0].prefill_rate == pytest.approx(20 / 0.8)
    assert cells[1].prefill_rate == pytest.approx(16 / 0.8)


def test_accepted_length_counts_the_bonus(cells: list[Cell]) -> None:
    assert cells[0].accepted_len == 1.0
    assert cells[1].accepted_len == pytest.approx(1 + 5 / 2)


def test_ratios_are_to_the_first_mode(cells: list[Cell]) -> None:
    rows = main_table(cells).splitlines()
    assert rows[2].startswith("| 1 | off | 3.0 (1.00x) | 2.8 (1.00x) | 25.0 (1.00x) | 400 | 1.00 |")
    assert rows[3].startswith("| 1 | suffix | 4.0 (1.33x) | 3.5 (1.25x) | 20.0 (0.80x) | 400 | 3.50 |")


def test_workloads_are_told_apart_for_single_streams(cells: list[Cell]) -> None:
    rows = workload_table([*cells, Cell("off", 4, [answer(3, 1, 1)], ["sql"])]).splitlines()
    assert rows == [
        "| workload | off | suffix |",
        "|---|---|---|",
        "| chat | 2.0 (1.00x) | 2.0 (1.00x) |",
        "| code | 4.0 (1.00x) | 8.0 (2.00x) |",
    ]


def test_an_empty_cell_has_no_rates() -> None:
    cell = Cell("off", 1)
    assert [cell.decode_rate, cell.total_rate, cell.prefill_rate, cell.ttft] == [0, 0, 0, 0]
    assert rate(3, 0) == 0
    assert "| 0.0 | 0.0 | 0.0 | 0 | 1.00 |" in main_table([cell])


@pytest.mark.parametrize(
    ("a", "b", "at"), [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [4], 0)]
)
def test_first_difference(a: list[int], b: list[int], at: int | None) -> None:
    assert first_difference(a, b) == at


def test_tokens_of_the_first_chunk_are_not_decoding() -> None:
    found = Answer()
    for ids, elapsed in [([], 0.1), ([1, 2], 0.5), ([3], 0.7), ([4, 5], 1.5), ([], 1.6)]:
        found.add_ids(ids, elapsed)
    assert (found.ids, found.ttft, found.num_decoded) == ([1, 2, 3, 4, 5], 0.5, 3)
    assert found.decode_time == pytest.approx(1.0)

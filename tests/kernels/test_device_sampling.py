"""Tokens that are found where the logits are, by torch or by Triton's kernel: those of the law as the CPU computes it,
word for word of its noise."""

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from verdraft.kernels.draws import BAD, UNSURE, Draws, Edits, Sampler
from verdraft.kernels.noise import Noise
from verdraft.kernels.sampling import LogitParams, TokenHistory, choose_token


@pytest.fixture(params=["torch", "triton"])
def law_tokens(request: pytest.FixtureRequest) -> Sampler:
    """Every implementation that can run here."""
    if request.param == "triton":
        pytest.importorskip("triton")
    found: Sampler = importlib.import_module(f"verdraft.kernels.{request.param}_sampling").law_tokens
    return found


SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 123456789012345)


def draws(temperatures: list[float], seeds: list[int], choices: list[int], positions: list[int]) -> Draws:
    return Draws(
        torch.tensor(temperatures, dtype=torch.float64),
        torch.tensor(seeds, dtype=torch.int64),
        torch.tensor(choices, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
    )


def law(
    row: Tensor, temperature: float, seed: int, choice: int, position: int, mask: Any = None, **filters: Any
) -> int:
    params = LogitParams(temperature=temperature, **filters)
    noise = Noise(seed, choice, position)
    return choose_token(row.numpy(), params, TokenHistory(params), None, noise, mask)


def limited(jobs: Draws, filters: Sequence[Mapping[str, float]]) -> Draws:
    """The same with filters, none at temperature 0."""
    on = [one if hot else {} for one, hot in zip(filters, jobs.temperatures.tolist(), strict=True)]
    limits = [
        (one.get("top_k", 0.0), one.get("top_p", 1.0), math.log(one["min_p"]) if "min_p" in one else -math.inf, 0.0)
        for one in on
    ]
    most = max(int(one["top_k"]) if {"top_k", "top_p"} <= one.keys() else 0 for one in on)
    return replace(jobs, limits=torch.tensor(limits, dtype=torch.float64), most=most)


def test_every_noise_word_is_the_cpus(law_tokens: Sampler) -> None:
    """A row whose only possible tokens are two: which of them wins tells their words apart, for many pairs."""
    noise, size = Noise(7, 3, 2**32 - 1), 5000
    words = noise.row_words(size)
    pairs = [(a, b) for a, b in zip(range(size - 1), range(1, size), strict=True)][::61]
    logits = torch.full((len(pairs), size), -torch.inf)
    for row, pair in zip(logits, pairs, strict=True):
        row[list(pair)] = 1.5
    rows = len(pairs)
    found = law_tokens(logits, draws([1.0] * rows, [7] * rows, [3] * rows, [2**32 - 1] * rows), None)
    assert found.tolist() == [max(pair, key=lambda token: (words[token], -token)) for pair in pairs]


@pytest.mark.parametrize("size", [1, 320, 2048, 5001])
def test_tokens_are_the_laws(law_tokens: Sampler, size: int) -> None:
    torch.manual_seed(size)
    temperatures = [0.0, 1.0, 0.7, 1.3, 25.0, 1e-3]
    rows = torch.randn(len(SEEDS), size + 7)[:, :size] * 4  # strided
    choices, positions = [0, 1, 2, 0, 4, 5], [0, 1, 77, 2**31, 4, 2**32 - 1]
    found = law_tokens(rows, draws(temperatures, list(SEEDS), choices, positions), None)
    expected = [law(*job) for job in zip(rows, temperatures, SEEDS, choices, positions, strict=True)]
    assert found.tolist() == expected


def test_a_reduced_vocabulary_has_its_tokens_noise(law_tokens: Sampler) -> None:
    torch.manual_seed(0)
    token_ids = torch.randperm(49152)[:300].sort().values
    scores = torch.randn(4, 300)
    full = torch.full((4, 49152), -torch.inf)
    full[:, token_ids] = scores
    jobs = [0.0, 1.0, 0.5, 2.0], [5, 6, 7, 8], [0, 0, 1, 1], [9, 10, 11, 12]
    found = law_tokens(scores, draws(*jobs), token_ids)
    assert found.tolist() == [law(row, *job) for row, *job in zip(full, *jobs, strict=True)]


FILTERS: list[dict[str, Any]] = [
    {"top_k": 5, "top_p": 0.8},
    {"top_p": 0.6},
    {"min_p": 0.05},
    {},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.01},
    {"top_k": 1},
    {"top_p": 1e-9},
    {"top_k": 10**6, "top_p": 0.99},
    {"min_p": 1.0},
]


@pytest.mark.parametrize("size", [1, 3, 320, 5001])
@pytest.mark.parametrize("steps", [0, 2], ids=["distinct", "many equal"])
def test_filtered_tokens_are_the_laws(law_tokens: Sampler, size: int, steps: int) -> None:
    """Of rows with and without filters in one batch; equal logits too, of which those of lower tokens are kept."""
    num = 2 * len(FILTERS)
    rows = torch.randn(num, size, generator=torch.Generator().manual_seed(size)) * 2
    if steps:
        rows = (rows * steps).round() / steps
    filters = [FILTERS[i % len(FILTERS)] for i in range(num)]
    temperatures = [(1.0, 3.0, 0.6, 25.0, 0.0)[i % 5] for i in range(num)]
    jobs = temperatures, list(range(num)), [0] * num, [7] * num
    found = law_tokens(rows, limited(draws(*jobs), filters)).tolist()
    expected = [law(row, *job, **one) for row, one, *job in zip(rows, filters, *jobs, strict=True)]
    assert found == expected
    one_by_one = [
        law_tokens(rows[i : i + 1], limited(draws(*([column[i]] for column in jobs)), filters[i : i + 1])).item()
        for i in range(0, num, 5)
    ]
    assert one_by_one == expected[::5]


@pytest.mark.parametrize("size", [3, 320, 2500])
def test_a_token_that_masks_may_not_turn_out_is_the_laws_under_any_of_them(law_tokens: Sampler, size: int) -> None:
    """And others are UNSURE: some mask that holds the best of all tokens leaves filters that turn it out."""
    num, rng = 2 * len(FILTERS), np.random.default_rng(size)
    rows = torch.randn(num, size, generator=torch.Generator().manual_seed(size)) * 2
    filters = [FILTERS[i % len(FILTERS)] for i in range(num)]
    jobs = [(1.0, 3.0)[i // len(FILTERS)] for i in range(num)], list(range(num)), [0] * num, [7] * num
    on = limited(draws(*jobs), filters)
    assert on.limits is not None
    on.limits[:, 3] = 1.0
    found, best = law_tokens(rows, on).tolist(), law_tokens(rows, draws(*jobs)).tolist()
    for i, (row, one, *job) in enumerate(zip(rows, filters, *jobs, strict=True)):
        better = (row > row[best[i]]).numpy()
        masks = [rng.random(size) < share for share in (1.0, 0.9, 0.5, 0.1)] + [better]
        laws = [law(row, *job, mask=mask | (np.arange(size) == best[i]), **one) for mask in masks]
        assert found[i] == (best[i] if set(laws) == {best[i]} else UNSURE)


def test_a_reduced_vocabulary_is_filtered_by_itself(law_tokens: Sampler) -> None:
    token_ids = torch.randperm(3000, generator=torch.Generator().manual_seed(0))[:300].sort().values
    scores = torch.randn(len(FILTERS), 300, generator=torch.Generator().manual_seed(4))
    full = torch.full((len(FILTERS), 3000), -torch.inf)
    full[:, token_ids] = scores
    jobs = [1.5] * len(FILTERS), list(range(len(FILTERS))), [0] * len(FILTERS), [3] * len(FILTERS)
    found = law_tokens(scores, limited(draws(*jobs), FILTERS), token_ids).tolist()
    assert found == [law(row, *job, **one) for row, one, *job in zip(full, FILTERS, *jobs, strict=True)]


def test_bad_rows_of_filtered_requests_give_no_token(law_tokens: Sampler) -> None:
    rows = torch.randn(4, 2500, generator=torch.Generator().manual_seed(5))
    rows[0, 2400], rows[1, 3], rows[2] = torch.nan, torch.inf, -torch.inf
    found = law_tokens(rows, limited(draws([1.0] * 4, [0] * 4, [0] * 4, [0] * 4), [{"top_k": 3, "top_p": 0.9}] * 4))
    assert (found == BAD).tolist() == [True, True, True, False]


def test_equal_logits_give_the_lowest_token_and_bad_rows_none(law_tokens: Sampler) -> None:
    rows = torch.zeros(5, 4100)
    rows[0, 4099] = rows[0, 2500] = 1.0
    rows[1, 2047] = rows[1, 2048] = 1.0
    rows[2, 4000] = torch.nan
    rows[3, 17] = torch.inf
    rows[4] = -torch.inf
    found = law_tokens(rows, draws([0.0] * 5, [0] * 5, [0] * 5, [0] * 5), None)
    assert found.tolist() == [2500, 2047, BAD, BAD, BAD]


@pytest.mark.parametrize("size", [1, 2, 320, 5001])
def test_margins_are_what_a_logit_may_fall_by(law_tokens: Sampler, size: int) -> None:
    """The token stays with a logit that is lower by less, and goes with one that is lower by more."""
    rows = torch.randn(len(SEEDS), size, generator=torch.Generator().manual_seed(size)).double() * 4
    jobs = draws([0.0, 1.0, 0.7, 1.3, 25.0, 0.05], list(SEEDS), [0, 1, 2, 0, 4, 5], [0, 1, 77, 2**31, 4, 5])
    margins = torch.empty(len(SEEDS), dtype=torch.float64)
    tokens = law_tokens(rows, jobs, None, margins)
    assert tokens.equal(law_tokens(rows, jobs, None))
    if size == 1:
        assert margins.tolist() == [torch.inf] * len(SEEDS)
        return
    for part, stays in ((0.999, True), (1.001, False)):
        lower = rows.scatter_add(1, tokens[:, None], -part * margins[:, None])
        assert law_tokens(lower, jobs, None).eq(tokens).tolist() == [stays] * len(SEEDS)


def test_a_batch_of_any_size_gives_a_row_the_same_token(law_tokens: Sampler) -> None:
    torch.manual_seed(1)
    rows = torch.randn(33, 700)
    jobs = [1.0] * 33, list(range(33)), [0] * 33, [5] * 33
    together = law_tokens(rows, draws(*jobs), None)
    alone = [law_tokens(rows[i : i + 1], draws(*([column[i]] for column in jobs)), None) for i in range(33)]
    assert np.array_equal(together, torch.cat(alone))
    assert law_tokens(rows[:0], draws([], [], [], []), None).tolist() == []


def test_biased_and_forbidden_tokens_are_the_laws(law_tokens: Sampler) -> None:
    """Of rows with and without, in one batch."""
    rows = torch.randn(len(SEEDS), 300, generator=torch.Generator().manual_seed(2)) * 2
    best = rows.argsort(1, descending=True)
    rows[2, best[2, 0]] = torch.nan  # forbidden there
    temperatures = [0.0, 1.0, 0.0, 0.7, 1.0, 0.0]
    bias = [{}, {int(best[1, 5]): 4.0, int(best[1, 0]): -9.0}, {}, {int(best[3, 1]): 2.5}, {7: 100.0}, {}]
    banned = [[], [int(best[1, 1])], [int(best[2, 0]), int(best[2, 1])], [], [7], [int(best[5, 0])]]
    found = {(row, token): value for row, some in enumerate(bias) for token, value in some.items()}
    found |= {(row, token): -np.inf for row, some in enumerate(banned) for token in some}
    at, zeros = torch.tensor(list(found)), [0] * len(SEEDS)
    edits = Edits(at[:, 0], at[:, 1], torch.tensor(list(found.values()), dtype=torch.float64))
    tokens = law_tokens(edits.of(rows), draws(temperatures, list(SEEDS), zeros, zeros), None).tolist()
    for i, seed in enumerate(SEEDS):
        params = LogitParams(temperature=temperatures[i], logit_bias=bias[i])
        assert tokens[i] == choose_token(rows[i].numpy(), params, TokenHistory(params), banned[i], Noise(seed, 0, 0))
    assert edits.of(rows).dtype == torch.float64

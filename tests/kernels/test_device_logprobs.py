"""Log-probabilities that are found where the logits are: those of sampling.row_logprobs."""

import pytest
import torch

from verdraft.kernels.sampling import LOGPROB_FLOOR, row_logprobs
from verdraft.kernels.torch_logprobs import logprobs


@pytest.fixture
def rows() -> torch.Tensor:
    """With many equal logits, zeros of both signs, impossible tokens and a very unlikely one."""
    rows = (torch.randn(6, 700, generator=torch.Generator().manual_seed(0)) * 6).round() / 2
    rows[1] = -rows[0]
    rows[2] = 0.0
    rows[2, 5] = -0.0
    rows[3, 50:] = -torch.inf
    rows[4, :5] = -20000.0
    rows[5] *= 1e-30
    return rows


@pytest.mark.parametrize("top", [0, 1, 20, 1000])
def test_logprobs_are_the_hosts(rows: torch.Tensor, top: int) -> None:
    tokens = torch.tensor([5, 0, 699, 3, 2, 8])
    found = logprobs(rows, tokens, top)
    num = min(top, 700)
    for told, row, token in zip(found, rows, tokens, strict=True):
        chosen, likeliest = row_logprobs(row.numpy(), int(token), top)
        assert told[1 : 1 + num].tolist() == [token for token, _ in likeliest]
        expected = torch.tensor([chosen, *(value for _, value in likeliest)], dtype=torch.float64)
        assert torch.allclose(told[[0, *range(1 + num, 1 + 2 * num)]], expected, rtol=0.0, atol=1e-9)
    assert found[4, 0] == LOGPROB_FLOOR


def test_a_rows_neighbours_and_the_order_of_its_tokens_change_no_bit(rows: torch.Tensor) -> None:
    tokens = torch.tensor([5, 0, 699, 3, 2, 8])
    together = logprobs(rows, tokens, 3)
    assert all(together[i : i + 1].equal(logprobs(rows[i : i + 1], tokens[i : i + 1], 3)) for i in range(len(rows)))
    assert together[:, 0].equal(logprobs(rows.flip(1), 699 - tokens, 3)[:, 0])


def test_bad_rows_have_none(rows: torch.Tensor) -> None:
    rows[0, 3], rows[1, 3], rows[2] = torch.nan, torch.inf, -torch.inf
    assert logprobs(rows, torch.tensor([5, 5, 5, 5, 5, -1]), 2)[:, 0].isnan().tolist() == [True] * 3 + [False] * 3

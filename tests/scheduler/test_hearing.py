"""What a device says of a head's logits instead of handing them over is what the host finds in them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from verdraft.kernels.noise import philox_blocks
from verdraft.kernels.sampling import LIKELIEST, BadLogits
from verdraft.model.exit_head import TokenIds
from verdraft.scheduler.device import Device, HostDevice
from verdraft.scheduler.hearing import Asked, Guess, Listener
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Request
from verdraft.scheduler.sequence import Sequence
from verdraft.scheduler.verifier import Law
from verdraft.spec.draft import NoDrafter

CPU = torch.device("cpu")
LAW = Law((2,), philox_blocks)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.0, "min_tokens": 9},
    {"temperature": 0.0},
]
RAW, PLAIN = [0, 1, 2, 3, 6], [0, 1, 3, 6]


@dataclass
class Table:
    """A head whose hidden states are its logits."""

    token_ids: TokenIds

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.fixture
def head() -> Table:
    return Table(np.sort(np.random.default_rng(0).permutation(2000)[:500]))


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(2 * len(KINDS), 500, generator=torch.Generator().manual_seed(0)) * 3


@pytest.fixture
def asked() -> list[Asked]:
    """Every other row, of requests of all kinds."""

    def sequence(i: int) -> Sequence:
        params = SamplingParams(seed=i - 3, **KINDS[i])
        request = Request(id=str(i), prompt=[5, 6, 7], params=params, choice=i % 2)
        return Sequence(request, i, NoDrafter(), num_segments=1, max_len=99)

    return [Asked(2 * i + 1, sequence(i), ahead=i) for i in range(len(KINDS))]


def token_of(head: Table, one: Asked, row: np.ndarray) -> int:
    full = np.full(2000, -np.inf, np.float32)
    full[head.token_ids] = row
    return LAW.token(one.seq, one.ahead, int(full.argmax()), lambda: full)


def test_a_guess_is_the_laws_token_at_the_head(
    head: Table, hidden: Tensor, asked: list[Asked], late_device: Callable[[], Device]
) -> None:
    rows = Listener(head, HostDevice(), CPU).guesses(hidden, asked)
    said = Listener(head, late_device(), CPU).guesses(hidden, asked)
    assert [i for i, one in enumerate(said) if isinstance(one, Guess)] == RAW
    for one, row, heard in zip(asked, rows, said, strict=True):
        assert np.array_equal(row, hidden[one.row].numpy())
        if isinstance(heard, Guess):
            assert heard.known() == token_of(head, one, row)
            place = int(np.searchsorted(head.token_ids, heard.token))
            assert heard.prob == pytest.approx(float(hidden[one.row].softmax(0)[place]), rel=1e-5)
        else:
            assert np.array_equal(heard, row)


@pytest.mark.parametrize("count", [1, 4])
def test_a_peak_leads_to_the_same_children(
    head: Table, hidden: Tensor, asked: list[Asked], late_device: Callable[[], Device], count: int
) -> None:
    whole = Listener(head, HostDevice(), CPU).peaks(hidden, asked)
    peaks = Listener(head, late_device(), CPU).peaks(hidden, asked)
    assert [i for i, peak in enumerate(peaks) if len(peak.values) == LIKELIEST] == PLAIN
    for one, full, peak in zip(asked, whole, peaks, strict=True):
        assert np.array_equal(full.values, hidden[one.row].numpy())
        if one.seq.request.params.temperature:
            found = [LAW.leading(one.seq, one.ahead, p.values, count, p.names) for p in (full, peak)]
        else:
            found = [p.likeliest(count) for p in (full, peak)]
            best = int(hidden[one.row].argmax())
            assert found[1][0][0] == head.token_ids[best]
            assert found[1][1][0] == pytest.approx(float(hidden[one.row].softmax(0)[best]), rel=1e-5)
        assert found[0][0].tolist() == found[1][0].tolist()
        np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-6)


def test_rows_that_are_not_finite_give_no_token(
    head: Table, hidden: Tensor, asked: list[Asked], late_device: Callable[[], Device]
) -> None:
    hidden[asked[0].row, 17] = torch.nan
    for device in (HostDevice(), late_device()):
        with pytest.raises(BadLogits):
            Listener(head, device, CPU).peaks(hidden, asked)[0].likeliest(1)
    said = Listener(head, late_device(), CPU).guesses(hidden, asked)[0]
    assert isinstance(said, Guess)
    with pytest.raises(BadLogits):
        said.known()


def test_how_far_tokens_are_behind(head: Table, hidden: Tensor, late_device: Callable[[], Device]) -> None:
    """Tokens that the head does not know are not behind."""
    known, unknown = int(head.token_ids[3]), int(np.setdiff1d(np.arange(2000), head.token_ids)[-1])
    for device in (HostDevice(), late_device()):
        found = Listener(head, device, CPU).behind(hidden, [4, 5, 4], [known, unknown, 1999])
        assert found[0] == hidden[4].max() - hidden[4, 3]
        assert found[1] == 0.0
        assert Listener(head, device, CPU).behind(hidden, [], []).size == 0

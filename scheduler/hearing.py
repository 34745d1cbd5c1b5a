"""What heads that only draft say, where the host can read it.

A whole row of logits is much for a GPU to hand over in the middle of a draft. Where temperature and filters alone shape
what comes next, it tells a token and its probability, and where there are no filters the few likeliest tokens; other
rows come whole.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from verdraft.kernels.draws import BAD
from verdraft.kernels.noise import IntArray
from verdraft.kernels.sampling import LIKELIEST, BadLogits
from verdraft.model.exit_head import TokenIds
from verdraft.scheduler.device import Device
from verdraft.scheduler.drawing import draws_of
from verdraft.scheduler.passed import Rows, is_raw
from verdraft.scheduler.sequence import Sequence

T = TypeVar("T")


class Head(Protocol):
    """Of exits, and of EAGLE."""

    @property
    def token_ids(self) -> TokenIds: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Asked(NamedTuple):
    """What follows `ahead` drafted tokens behind those committed, at this row of the hidden states."""

    row: int
    seq: Sequence
    ahead: int


@dataclass(frozen=True, slots=True)
class Guess:
    """The law's token at a head, and the probability that the head alone gives it."""

    token: int  # or draws.BAD
    prob: float

    def known(self) -> int:
        """Raises BadLogits where there is no token."""
        if self.token == BAD:
            raise BadLogits("a head's logits are not finite")
        return self.token


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest logits of a row, or all of them, those of smaller token ids first."""

    names: IntArray  # [m] token ids
    values: Rows  # [m]
    mass: float  # log of the sum of exp over the whole row

    def likeliest(self, count: int) -> tuple[IntArray, Rows]:
        """Ids of the largest, the largest first, and their shares of probability. Raises BadLogits."""
        values = self.values
        if count == 1:
            order = np.array([values.argmax()])
        else:
            order = np.argpartition(-values, min(count, values.size - 1))[:count]
            order = order[np.argsort(-values[order], kind="stable")]
        if not math.isfinite(self.mass):
            raise BadLogits("a head's logits are not finite")
        return self.names[order], np.exp(values[order] - self.mass)


class Listener:
    """Asks one head, which is at `place`."""

    def __init__(self, head: Head, device: Device, place: torch.device) -> None:
        self.head, self.device = head, device
        self._ids = torch.from_numpy(head.token_ids).to(place)  # [R]

    @property
    def token_ids(self) -> TokenIds:
        """[R] ascending: of the columns of its logits."""
        return self.head.token_ids

    def guesses(self, hidden: Tensor, asked: Seq[Asked]) -> list[Guess | Rows]:
        """A token for every row asked about, or the row itself [R] where the host has to find it."""
        order = _order(asked, self._draws)
        told = [asked[i] for i in order if self._draws(asked[i])]
        draws = draws_of([(one.seq, one.ahead) for one in told])
        index, *columns = self.device.put([_rows(asked, order), *draws.arrays])
        logits = self.head.logits(hidden[index])
        mine, others = logits[: len(told)], logits[len(told) :]
        said: list[Guess | Rows] = []
        if self.device.sampler and told:
            tokens = self.device.sampler(mine, draws.placed(columns).draws, self._ids)
            chosen = mine.gather(1, torch.searchsorted(self._ids, tokens.clamp(min=0))[:, None])[:, 0]
            found, probs, rows = self.device.fetch([tokens, (chosen - mine.logsumexp(1)).exp(), others])
            said += map(Guess, found.tolist(), probs.tolist())
        else:
            (rows,) = self.device.fetch([others])
        return _in_order([*said, *rows], order)

    def peaks(self, hidden: Tensor, asked: Seq[Asked]) -> list[Peak]:
        """Of every row asked about, at least the LIKELIEST tokens, and all where more than a temperature counts."""
        order = _order(asked, self._tells)
        num = sum(map(self._tells, asked))
        logits = self.head.logits(hidden[self.device.put([_rows(asked, order)])[0]])
        few = self._likeliest(logits[:num]) if num else []  # not every kernel of torch's takes nothing
        mass, whole, *told = self.device.fetch([logits.logsumexp(1), logits[num:], *few])
        names = [*(told[0] if told else ()), *[self.head.token_ids] * len(whole)]
        values = [*(told[1] if told else ()), *whole]
        return _in_order(list(map(Peak, names, values, mass.tolist())), order)

    def _likeliest(self, logits: Tensor) -> list[Tensor]:  # [n, R] -> [n, m] each
        """Token ids, ascending, and their logits."""
        values, places = logits.topk(min(LIKELIEST, logits.shape[1]), 1)
        places, there = places.sort(1)
        return [self._ids[places], values.gather(1, there)]

    def behind(self, hidden: Tensor, rows: Seq[int], tokens: Seq[int]) -> Rows:
        """How far behind the row's largest logit each token's is [n]; 0 for tokens that the head does not know."""
        ids = self.head.token_ids
        places = np.searchsorted(ids, tokens).clip(max=len(ids) - 1)
        index, there = self.device.put([np.array(rows, np.int64), places])
        logits = self.head.logits(hidden[index])
        (found,) = self.device.fetch([logits.amax(1) - logits.gather(1, there[:, None])[:, 0]])
        return np.where(ids[places] == tokens, found, np.float32(0.0))

    def _draws(self, one: Asked) -> bool:
        """Whether the device finds the token."""
        return self.device.sampler is not None and is_raw(one.seq)

    def _tells(self, one: Asked) -> bool:
        """Whether the likeliest tokens tell all that counts."""
        return self._draws(one) and not one.seq.request.params.is_filtered


def _order(asked: Seq[Asked], first: Callable[[Asked], bool]) -> list[int]:
    """These first, then the others."""
    return sorted(range(len(asked)), key=lambda i: not first(asked[i]))


def _rows(asked: Seq[Asked], order: Seq[int]) -> IntArray:
    return np.array([asked[i].row for i in order], np.int64)


def _in_order(said: Seq[T], order: Seq[int]) -> list[T]:
    return [said[i] for i in np.argsort(order).tolist()]

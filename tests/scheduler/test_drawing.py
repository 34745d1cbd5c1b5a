"""What the device is told of the rows whose tokens it finds: enough to find those of the law."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch

from verdraft.kernels.sampling import processed
from verdraft.scheduler.drawing import draws_of_plan
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.passed import banned
from verdraft.scheduler.plan import Work
from verdraft.scheduler.request import Request
from verdraft.scheduler.sequence import Sequence
from verdraft.spec.draft import EMPTY, Draft, NoDrafter

EOS = (2,)
VOCAB = 60
KINDS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"temperature": 0.0},
    {"presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {7: 3.5, 12: -1.0}},
    {"repetition_penalty": 0.7, "presence_penalty": -2.0, "frequency_penalty": 0.7, "min_tokens": 6},
    {"repetition_penalty": 1e300, "frequency_penalty": 2.0},
    {"repetition_penalty": 1e-300},
    {"repetition_penalty": 10**20},
]
DRAFTS = [
    EMPTY,
    Draft((7, 12, 7, 30, 7)),
    Draft((12, 7, 12, 7, 30, 12), parents=(-1, -1, 0, 1, 2, 3)),
]


def work_of(kind: dict[str, Any], draft: Draft, output: Seq[int]) -> Work:
    seq = Sequence(
        Request(id="", prompt=[5, 7, 9, 7], params=SamplingParams(seed=3, **kind)), 0, NoDrafter(), 1, max_len=99
    )
    for token in output:
        seq.push(token)
    seq.tokens += output
    end = len(seq.tokens) + len(draft.tokens)
    return Work(seq, len(seq.tokens) - 1, end - len(seq.tokens) + 1, draft)


def law(work: Work, logits: np.ndarray) -> list[np.ndarray]:
    seq, paths = work.seq, [[], *[work.draft.tokens[: i + 1] for i in range(len(work.draft.tokens))]]
    if work.draft.parents:
        paths = [[], [12], [7], [12, 12], [7, 7], [12, 12, 30], [7, 7, 12]]
    rows = []
    for row, path in zip(logits, paths, strict=True):
        for token in path:
            seq.push(token)
        rows.append(processed(row, seq.request.params, seq.history, banned(seq, len(path), EOS)))
        for _ in path:
            seq.pop()
    return rows


@pytest.mark.parametrize("draft", DRAFTS, ids=["none", "chain", "tree"])
@pytest.mark.parametrize("output", [[], [7, 9, 7, 20]])
def test_changed_logits_are_the_laws_bit_for_bit(draft: Draft, output: list[int]) -> None:
    """Penalties, bias and forbidden ends of requests in one pass, each row behind the drafted tokens of its path."""
    works = [work_of(kind, draft, output) for kind in KINDS]
    size = len(draft.tokens) + 1
    logits = np.random.default_rng(1).normal(scale=5, size=(len(works) * size, VOCAB)).astype(np.float32)
    logits[::2, 7], logits[1::3, 12], logits[::3, 9] = -np.inf, 0.0, 1e30
    expected = [row for i, work in enumerate(works) for row in law(work, logits[i * size : (i + 1) * size])]
    draws = draws_of_plan(works, EOS)
    placed = draws.placed([torch.from_numpy(array.copy()) for array in draws.arrays])
    assert np.array_equal(placed.changed(torch.from_numpy(logits)).numpy(), np.array(expected))
    assert draws.num == len(placed.draws.seeds) == len(works) * size


def test_nothing_is_sent_for_what_no_row_needs() -> None:
    draws = draws_of_plan([work_of({}, EMPTY, []), work_of({"temperature": 0.3}, DRAFTS[1], [5])], EOS)
    assert len(draws.arrays) == 4
    placed = draws.placed([torch.from_numpy(array) for array in draws.arrays])
    logits = torch.zeros(7, VOCAB)
    assert placed.changed(logits) is logits


def test_filters_count_where_there_is_a_temperature() -> None:
    kinds = [{"top_k": 9, "temperature": 0.0}, {}, {"top_k": 7, "min_p": 0.5}, {"top_k": 3, "top_p": 0.9}]
    draws = draws_of_plan([work_of(kind, EMPTY, []) for kind in kinds], EOS)
    *_, limits = draws.columns
    off = (0.0, 1.0, -np.inf, 0.0)
    assert [tuple(row) for row in limits] == [off, off, (7.0, 1.0, np.log(0.5), 0.0), (3.0, 0.9, -np.inf, 0.0)]
    assert draws.most == 3

"""verify() is decoding: whatever the draft, its tokens are the target's."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verdraft.spec.acceptance import verify
from verdraft.spec.draft import EMPTY, Draft


class RecordingTarget:
    """A target that always continues with `tokens`, and notes what it was asked for."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self.asked: list[int] = []

    def __call__(self, position: int) -> int:
        self.asked.append(position)
        return self.tokens[position]


@pytest.mark.parametrize(
    ("draft", "kept"),
    [
        ((), [7]),  # decode: one bonus token
        ((7,), [7, 8]),
        ((7, 8), [7, 8, 9]),
        ((7, 5), [7, 8]),  # recovered
        ((5, 8), [7]),
        ((7, 5, 9), [7, 8]),  # what follows a mismatch counts for nothing
    ],
)
def test_accepted_recovered_and_bonus(draft: tuple[int, ...], kept: list[int]) -> None:
    target = RecordingTarget([7, 8, 9, 10])
    assert verify(Draft(draft), target) == kept
    assert target.asked == list(range(len(kept)))


small = st.integers(0, 2)


@settings(deadline=None)
@given(st.lists(small, max_size=8), st.lists(small, min_size=9, max_size=9))
def test_the_draft_never_changes_the_tokens(draft: list[int], law: list[int]) -> None:
    kept = verify(Draft(tuple(draft)), RecordingTarget(law))
    assert kept == law[: len(kept)]
    assert len(kept) == 1 + next((i for i, token in enumerate(draft) if token != law[i]), len(draft))


def test_an_empty_draft_asks_once() -> None:
    target = RecordingTarget([3])
    assert verify(EMPTY, target) == [3]
    assert target.asked == [0]


def test_trees_are_refused() -> None:
    with pytest.raises(AssertionError, match="chains"):
        verify(Draft((1, 2), parents=(-1, -1)), RecordingTarget([1, 2, 3]))

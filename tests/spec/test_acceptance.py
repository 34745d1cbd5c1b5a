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


def law_of(path: Sequence[int]) -> int:
    """A token that depends on everything before it."""
    return hash(("law", *path)) % 3


@settings(deadline=None)
@given(st.lists(st.tuples(small, st.integers(0, 4)), max_size=12))
def test_a_tree_gives_the_tokens_that_its_paths_give(nodes: list[tuple[int, int]]) -> None:
    """Nodes are asked for what follows their own path, never for one that is not accepted."""
    parents = tuple(max(-1, i - 1 - back) for i, (_, back) in enumerate(nodes))
    draft = Draft(tuple(token for token, _ in nodes), parents=parents)
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for i, parent in enumerate(parents):
        paths[i] = (*paths[parent], draft.tokens[i])
    asked: list[int] = []

    def target(i: int) -> int:
        asked.append(i - 1)
        return law_of(paths[i - 1])

    kept = verify(draft, target)
    assert kept == [law_of(kept[:i]) for i in range(len(kept))]
    assert asked == [-1, *draft.path(kept)]
    assert [list(paths[node]) for node in asked] == [kept[:i] for i in range(len(kept))]
    children = [draft.tokens[i] for i, parent in enumerate(parents) if parent == asked[-1]]
    assert kept[-1] not in children  # nothing more could have been accepted


def test_the_beginning_of_a_tree_is_a_tree() -> None:
    tree = Draft((1, 2, 3, 4), probs=(0.9, 0.5, 0.4, 0.1), parents=(-1, -1, 0, 1))
    assert tree.depths == [1, 1, 2, 2]
    assert tree.trim(3) == Draft((1, 2, 3), probs=(0.9, 0.5, 0.4), parents=(-1, -1, 0))
    assert verify(tree.trim(3), RecordingTarget([2, 0, 4])) == [2, 4]

"""Selection without sorting, against sorting: the same indices for every input."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verdraft.kernels.ranking import head, largest, nucleus


def weights_of(seed: int, size: int, kind: str) -> np.ndarray:
    """Shapes that are hard in different ways; all but the first two have many ties."""
    random = np.random.default_rng(seed)
    match kind:
        case "flat":
            return np.exp(random.normal(0, 0.1, size))
        case "steep":
            return np.exp(random.normal(0, 12, size))
        case "vanishing":
            return np.exp(random.normal(0, 12, size)) * (random.random(size) < 0.5) + np.eye(1, size)[0]
        case "exact":  # sums are exact, so the mass often equals what is wanted
            return random.integers(1, 5, size) / 4
        case "few":
            return np.where(random.random(size) < 0.01, 1.0, 0.0) + np.eye(1, size)[0]
        case _:
            return np.ones(size)


weights = st.builds(
    weights_of,
    st.integers(0, 10**6),
    st.sampled_from([1, 2, 255, 257, 3000, 20_000]),
    st.sampled_from(["flat", "steep", "vanishing", "exact", "few", "equal"]),
)


def order_of(values: np.ndarray) -> np.ndarray:
    """The largest first, of equals the lower index."""
    return np.argsort(-values, kind="stable")


def sorted_nucleus(values: np.ndarray, top_p: float) -> list[int]:
    """The definition."""
    order = order_of(values)
    mass = np.cumsum(values[order])
    return sorted(order[: int(np.searchsorted(mass, top_p * values.sum())) + 1].tolist())


@settings(deadline=None)
@given(weights, st.sampled_from([1e-300, 1e-9, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999, 1 - 1e-9, 1 - 1e-16]))
def test_the_nucleus_is_what_sorting_finds(values: np.ndarray, top_p: float) -> None:
    assert nucleus(values, top_p).tolist() == sorted_nucleus(values, top_p)


@settings(deadline=None)
@given(weights, st.data())
def test_the_nucleus_is_right_where_the_mass_just_reaches_it(values: np.ndarray, data: st.DataObject) -> None:
    """Shares taken from the masses themselves, and one rounding beside them: too close for any other order of sums."""
    mass = np.cumsum(values[order_of(values)])
    share = mass[data.draw(st.integers(0, values.size - 1))] / values.sum()
    for top_p in (np.nextafter(share, 0), share, np.nextafter(share, 2)):
        assert nucleus(values, min(top_p, 1.0)).tolist() == sorted_nucleus(values, min(top_p, 1.0))


@settings(deadline=None)
@given(weights, st.floats(0, 1))
def test_the_largest_are_what_sorting_finds(values: np.ndarray, share: float) -> None:
    k = max(1, round(share * values.size))
    assert largest(values, k).tolist() == sorted(order_of(values)[:k].tolist())


@settings(deadline=None)
@given(weights, st.sampled_from([1, 50, 128, 1000]))
def test_the_head_is_above_all_others(values: np.ndarray, at_least: int) -> None:
    ids = head(values, at_least)
    others = np.delete(values, ids)
    assert ids.size >= min(at_least, values.size)
    assert (np.diff(ids) > 0).all()
    assert others.size == 0 or others.max() < values[ids].min()


@pytest.mark.parametrize(
    ("values", "top_p", "expected"),
    [([0.5, 0.25, 0.25], 0.75, [0, 1]), ([0.25, 0.25, 0.5], 0.75, [0, 2]), ([0, 1, 0], 1.0, [1]), ([2], 0.1, [0])],
)
def test_nuclei_by_hand(values: Sequence[float], top_p: float, expected: list[int]) -> None:
    assert nucleus(np.array(values, np.float64), top_p).tolist() == expected

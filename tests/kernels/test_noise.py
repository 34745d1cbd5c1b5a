"""The noise is Philox, random access, and Gumbel."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verdraft.kernels.native import NativeOps
from verdraft.kernels.noise import GUMBEL_MAX, GUMBEL_MIN, Noise, least_word, philox, philox_blocks, to_gumbel

SEEDS = st.integers(-(2**63), 2**63 - 1)
UINT32 = st.integers(0, 2**32 - 1)


def gumbel_row(seed: int, choice: int, position: int, vocab_size: int) -> np.ndarray:
    return to_gumbel(Noise(seed, choice, position).row_words(vocab_size))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_published_philox_vectors(counter: list[int], key: tuple[int, int], expected: list[int]) -> None:
    assert philox(np.array(counter, np.uint64)[:, None], key)[:, 0].tolist() == expected


@settings(deadline=None)
@given(
    SEEDS,
    st.integers(0, 127),
    st.integers(0, 2**20),
    st.lists(st.integers(0, 999), min_size=1, max_size=400),
)
def test_any_subset_has_the_noise_of_the_full_row(seed: int, choice: int, position: int, tokens: list[int]) -> None:
    ids = np.array(tokens, np.int64)
    full = gumbel_row(seed, choice, position, 1000)
    assert np.array_equal(Noise(seed, choice, position).gumbel(ids), full[ids])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])  # the fixture never changes
@given(seed=SEEDS, choice=UINT32, position=UINT32, blocks=st.lists(UINT32, max_size=70))
def test_native_words_are_the_same(native: NativeOps, seed: int, choice: int, position: int, blocks: list[int]) -> None:
    ids = np.array(blocks, np.uint32)
    for part in (ids, ids[::2]):
        words = native.philox_blocks(seed, choice, position, part)
        assert words.dtype == np.uint32
        assert np.array_equal(words, philox_blocks(seed, choice, position, part))


def test_native_words_of_a_whole_vocabulary_are_the_same(native: NativeOps) -> None:
    for vocab_size in (1, 63, 64, 65, 49_152, 151_936):
        expected = Noise(-7, 1, 2**32 - 1).row_words(vocab_size)
        assert expected.shape == (vocab_size,)
        assert np.array_equal(Noise(-7, 1, 2**32 - 1, native.philox_blocks).row_words(vocab_size), expected)


def test_the_row_does_not_depend_on_the_vocabulary_size() -> None:
    assert np.array_equal(gumbel_row(1, 2, 3, 10), gumbel_row(1, 2, 3, 4096)[:10])


def test_no_tokens_have_no_noise() -> None:
    assert Noise(1, 2, 3).gumbel(np.array([], np.int64)).size == 0


def test_every_part_of_the_key_matters() -> None:
    rows = [gumbel_row(*key, 64) for key in [(0, 0, 0), (1, 0, 0), (-1, 0, 0), (2**32, 0, 0), (0, 1, 0), (0, 0, 1)]]
    assert len({row.tobytes() for row in rows}) == len(rows)


def test_a_negative_seed_is_its_two_s_complement() -> None:
    """-1 and the smallest int64 are ordinary seeds."""
    low = gumbel_row(-(2**63), 0, 0, 8)
    assert np.isfinite(low).all()
    assert not np.array_equal(low, gumbel_row(0, 0, 0, 8))


def test_bounds_and_moments_are_gumbel() -> None:
    noise = np.concatenate([gumbel_row(7, 0, position, 4096) for position in range(50)])
    assert noise.min() >= GUMBEL_MIN
    assert noise.max() <= GUMBEL_MAX
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)  # Euler's constant
    assert noise.std() == pytest.approx(math.pi / math.sqrt(6), abs=0.01)


def test_the_bounds_are_the_extreme_words() -> None:
    extremes = -np.log(-np.log((np.array([0.0, 2.0**32 - 1]) + 0.5) / 2.0**32))
    assert extremes[0] == pytest.approx(GUMBEL_MIN, abs=1e-12)
    assert extremes[1] == pytest.approx(GUMBEL_MAX, abs=1e-9)


@pytest.mark.parametrize("bound", [GUMBEL_MIN - 1, GUMBEL_MIN, -2.0, 0.0, 0.5, 7.0, 15.0, 21.0, 22.0, GUMBEL_MAX])
def test_no_word_below_the_least_reaches_the_bound(bound: float) -> None:
    least = least_word(bound)
    near = np.unique(np.clip(np.arange(least - 1000, least + 4), 0, 2**32 - 1)).astype(np.uint32)
    noise = to_gumbel(near)
    assert (noise[near < least] < bound).all()
    assert noise[-1] >= bound  # and few words above it fall short
    assert (np.diff(noise) >= 0).all()


@settings(deadline=None)
@given(st.floats(GUMBEL_MIN, GUMBEL_MAX), UINT32)
def test_a_word_that_reaches_a_bound_is_never_below_the_least(bound: float, word: int) -> None:
    assert word >= least_word(bound) or to_gumbel(np.array([word], np.uint32))[0] < bound

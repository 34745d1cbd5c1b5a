"""The largest of many values, without sorting them: what top-k, top-p and pruning need. Knows no token.

Of equal values the lower index counts as the larger one, everywhere.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from verdraft.kernels.noise import IntArray

Values: TypeAlias = NDArray[np.floating]

_STRIDE = 64  # one value in so many is looked at to guess where a cut lies
_FEW = 256  # values that are cheaper to sort than to narrow down
_ROUNDING = 2.0**-51  # per addition, of the sum: four times what their order can change


def head(values: Values, at_least: int) -> IntArray:
    """Indices, ascending, of the largest values: `at_least` of them, mostly not many more, and all ties of the last.

    So every other value is smaller than each of these.
    """
    sample = values[::_STRIDE]
    place = sample.size - min(sample.size, 2 * at_least // _STRIDE + 4)
    found = np.flatnonzero(values >= np.partition(sample, place)[place])
    return found if found.size >= at_least else np.arange(values.size)


def largest(values: Values, k: int) -> IntArray:
    """Indices, ascending, of the k largest; 1 <= k <= N."""
    ids = head(values, k)
    inside = values[ids]
    cut = np.partition(inside, inside.size - k)[inside.size - k]
    return ids[_down_to(inside, cut, k - int(np.count_nonzero(inside > cut)))]


def nucleus(weights: Values, top_p: float) -> IntArray:
    """Indices, ascending, of the smallest set of largest weights (none negative) whose share is at least top_p."""
    total = float(weights.sum())
    wanted = top_p * total
    pool, above = _narrow(weights, total, wanted)
    ordered, mass = _accumulate(pool, above)
    if np.abs(mass - wanted).min() < _ROUNDING * weights.size * total:
        # Too close to call: by definition, the weights are added one by one, the largest first.
        ordered, mass = _accumulate(weights, 0.0)
    last = min(max(0, int(np.searchsorted(mass, wanted)) - 1), ordered.size - 1)
    return _down_to(weights, ordered[last], int(np.count_nonzero(ordered[: last + 1] == ordered[last])))


def _narrow(weights: Values, mass: float, wanted: float) -> tuple[Values, float]:
    """The few of the weights (`mass` together) among which that of the larger ones reaches `wanted`; the mass above."""
    pool, above = weights, 0.0
    while pool.size > _FEW and mass > 0.0:
        high = pool > _pivot(pool, (wanted - above) / mass)
        few_high = 2 * np.count_nonzero(high) < pool.size
        few = pool[np.flatnonzero(high if few_high else ~high)]
        if few.size == 0:
            break  # most are equal
        high_mass = float(few.sum()) if few_high else mass - float(few.sum())
        enough = above + high_mass >= wanted
        pool = few if enough == few_high else pool[np.flatnonzero(high if enough else ~high)]
        above, mass = (above, high_mass) if enough else (above + high_mass, mass - high_mass)
    return pool, above


def _pivot(pool: Values, share: float) -> float:
    """A weight near which the mass of the larger ones reaches `share`, so chosen that this probably happens on that
    side of it where there are fewer weights."""
    sample = np.sort(pool[:: pool.size // _FEW])[::-1]
    mass = np.cumsum(sample)
    edge = int(np.searchsorted(mass, share * mass[-1]))
    aside = sample.size // 24 + 1
    return float(sample[edge + aside if 2 * edge < sample.size else max(0, min(edge, sample.size - 1) - aside)])


def _accumulate(pool: Values, above: float) -> tuple[Values, Values]:
    """The pool [N] in descending order, and the mass [N + 1] before each of its weights and at the end."""
    ordered = np.sort(pool)[::-1]
    return ordered, np.cumsum(np.concatenate(([above], ordered)))


def _down_to(values: Values, cut: float, num_equal: int) -> IntArray:
    """Indices, ascending, of all values above `cut` and of the first `num_equal` that equal it."""
    kept = values >= cut
    kept[np.flatnonzero(values == cut)[num_equal:]] = False
    return np.flatnonzero(kept)

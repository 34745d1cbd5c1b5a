"""Gumbel noise as a pure function of (seed, choice, position, token). Knows no logits and no request.

Counter-based (Philox4x32-10, Salmon et al. 2011): any subset of tokens gets the values that it has in the full row,
so every stage at a position shares one noise without storing it (DESIGN section 3, PAPERS section 6.5). Words are
integers, equal whoever computes them; the logarithms are taken here alone, so that the values are too.
"""

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.uint32]
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10
_TO_UNIT = 2.0**-32

GUMBEL_MAX = -math.log(-math.log1p(-(2.0**-33)))  # no value is larger: uniforms end half a step before 1
GUMBEL_MIN = -math.log(33 * math.log(2.0))


class PhiloxBlocks(Protocol):
    """Computes noise words; all implementations give the same. See `philox_blocks`."""

    def __call__(self, seed: int, choice: int, position: int, blocks: Words) -> Words: ...


class Contenders(Protocol):
    """Tokens, ascending, one of which has the largest (logit - highest) / temperature + noise of what `limits` leave of
    a row [V], in exact arithmetic or in sampling.py's; None: too close to call. `highest` is the row's largest, finite;
    `row` is near `exact` if that is given."""

    def __call__(
        self,
        draw: tuple[int, int, int],  # seed, choice, position
        row: NDArray[np.float32],
        exact: NDArray[np.float64] | None,
        highest: float,
        temperature: float,
        limits: tuple[int, float, float],  # top_k, 0: off; top_p, 1: off; the least score, -infinity: off
    ) -> IntArray | None: ...


def philox(counter: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Philox4x32-10 of counters [4, N] under one key of two 32-bit words: [4, N] words, each below 2**32."""
    c0, c1, c2, c3 = counter
    for i in range(_ROUNDS):
        k0, k1 = np.uint64((key[0] + i * _W0) & 0xFFFFFFFF), np.uint64((key[1] + i * _W1) & 0xFFFFFFFF)
        a, b = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (b >> _SHIFT) ^ c1 ^ k0, b & _LOW, (a >> _SHIFT) ^ c3 ^ k1, a & _LOW
    return np.stack((c0, c1, c2, c3))


def philox_blocks(seed: int, choice: int, position: int, blocks: Words) -> Words:
    """Noise words [N, 4] of `blocks` [N], block b being tokens 4b to 4b + 3; in numpy, and the oracle of the rest.

    `seed` is any int64; choice and position are below 2**32.
    """
    counter = np.zeros((4, blocks.size), np.uint64)
    counter[0], counter[1], counter[2] = blocks, position, choice
    return philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)).T.astype(np.uint32)


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of all tokens at one OUTPUT position of one choice."""

    seed: int  # any int64
    choice: int
    position: int
    blocks: PhiloxBlocks = philox_blocks
    contenders: Contenders | None = None  # of the same words, where there is something quick

    def __post_init__(self) -> None:
        assert 0 <= self.position < 2**32
        assert 0 <= self.choice < 2**32

    def row_words(self, vocab_size: int) -> Words:
        """The words of tokens 0..vocab_size-1."""
        return self._blocks(np.arange((vocab_size + 3) // 4, dtype=np.uint32)).reshape(-1)[:vocab_size]

    def words(self, tokens: IntArray) -> Words:
        """The words of `tokens` [N], in any order."""
        last = int(tokens.max(initial=0))
        words: Words
        if 4 * tokens.size > last:
            words = self.row_words(last + 1)[tokens]
        else:
            words = self._blocks((tokens >> 2).astype(np.uint32))[np.arange(tokens.size), tokens & 3]
        return words

    def gumbel(self, tokens: IntArray) -> NDArray[np.float64]:
        """The noise of `tokens` [N], in any order."""
        return to_gumbel(self.words(tokens))

    def _blocks(self, blocks: Words) -> Words:
        return self.blocks(self.seed, self.choice, self.position, blocks)


def to_gumbel(words: Words) -> NDArray[np.float64]:
    """The noise that the words stand for: rising with the word."""
    uniform = (words.astype(np.float64) + 0.5) * _TO_UNIT  # exact, strictly inside (0, 1)
    return -np.log(-np.log(uniform))


def least_word(noise: float) -> int:
    """No smaller word's noise reaches `noise`, and hardly any larger word's falls short: `to_gumbel` backwards."""
    if noise <= GUMBEL_MIN:
        return 0
    # Rounding costs far less than the one word that is given away.
    return max(0, math.floor(math.exp(-math.exp(-noise)) * 2.0**32 - 0.5) - 1)

"""Gumbel noise as a pure function of (seed, choice, position, token). Knows no logits and no request.

Counter-based (Philox4x32-10, Salmon et al. 2011): any subset of tokens gets the values that it has in the full row,
so every stage at a position shares one noise without storing it (DESIGN section 3, PAPERS section 6.5).
"""

import math

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10
_TO_UNIT = 2.0**-32

GUMBEL_MAX = -math.log(-math.log1p(-(2.0**-33)))  # no value is larger: uniforms end half a step before 1
GUMBEL_MIN = -math.log(33 * math.log(2.0))


def philox(counter: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Philox4x32-10 of counters [4, N] under one key of two 32-bit words: [4, N] words, each below 2**32."""
    c0, c1, c2, c3 = counter
    for i in range(_ROUNDS):
        k0, k1 = np.uint64((key[0] + i * _W0) & 0xFFFFFFFF), np.uint64((key[1] + i * _W1) & 0xFFFFFFFF)
        a, b = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (b >> _SHIFT) ^ c1 ^ k0, b & _LOW, (a >> _SHIFT) ^ c3 ^ k1, a & _LOW
    return np.stack((c0, c1, c2, c3))


def _blocks(seed: int, choice: int, position: int, blocks: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Noise words [4, N] of the blocks of four tokens; `seed` is any int64."""
    assert 0 <= position < 2**32
    assert 0 <= choice < 2**32
    counter = np.zeros((4, blocks.size), np.uint64)
    counter[0], counter[1], counter[2] = blocks, position, choice
    return philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))


def _to_gumbel(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    uniform = (words.astype(np.float64) + 0.5) * _TO_UNIT  # exact, strictly inside (0, 1)
    return -np.log(-np.log(uniform))


def gumbel_row(seed: int, choice: int, position: int, vocab_size: int) -> NDArray[np.float64]:
    """The noise of tokens 0..vocab_size-1."""
    words = _blocks(seed, choice, position, np.arange((vocab_size + 3) // 4, dtype=np.uint64))
    return _to_gumbel(words.T.reshape(-1)[:vocab_size])


def gumbel(seed: int, choice: int, position: int, tokens: IntArray) -> NDArray[np.float64]:
    """The noise of `tokens` [N] (any order) at one OUTPUT position: `gumbel_row(...)[tokens]` bit for bit."""
    if tokens.size and 4 * tokens.size > int(tokens.max()):
        return gumbel_row(seed, choice, position, int(tokens.max()) + 1)[tokens]
    blocks, lanes = (tokens >> 2).astype(np.uint64), tokens & 3
    return _to_gumbel(_blocks(seed, choice, position, blocks)[lanes, np.arange(tokens.size)])

"""The law's token (DESIGN section 3) of many rows at once where the logits are: argmax of logit / temperature + noise.

The noise words are those of noise.py, and the arithmetic is sampling.py's in float64; what a logarithm's last bit can
change is nothing that a test could find. Filters, penalties and masks are sampling.py's alone. Knows no request.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from verdraft.kernels.draws import BAD, Draws

_BLOCK: Final = 2048  # columns of one program


def law_tokens(logits: Tensor, draws: Draws, token_ids: Tensor | None = None, margins: Tensor | None = None) -> Tensor:
    """See draws.Sampler."""
    rows, columns = logits.shape
    highest = logits.amax(1).double()
    fine = highest.isfinite()
    blocks = triton.cdiv(columns, _BLOCK)
    best, second = logits.new_empty((2, rows, blocks), dtype=torch.float64)
    where = logits.new_empty((rows, blocks), dtype=torch.int64)
    tokens = logits.new_empty((rows,), dtype=torch.int64)
    if rows:
        _best_of_block[(rows, blocks)](
            logits,
            draws.seeds if token_ids is None else token_ids,
            highest.where(fine, 0.0),
            draws.temperatures,
            draws.seeds,
            draws.choices,
            draws.positions,
            best,
            second,
            where,
            columns,
            logits.stride(0),
            BLOCK=_BLOCK,
            REDUCED=token_ids is not None,
            MARGINS=margins is not None,
            enable_fp_fusion=False,
        )
        _best_of_row[(rows,)](
            best,
            second,
            where,
            draws.temperatures,
            tokens,
            best if margins is None else margins,
            blocks,
            BLOCK=triton.next_power_of_2(blocks),
            MARGINS=margins is not None,
        )
    return tokens.where(fine, BAD)


@triton.jit
def _best_of_block(
    logits, token_ids, highest, temperatures, seeds, choices, positions, best, second, where, columns, stride,
    BLOCK: tl.constexpr, REDUCED: tl.constexpr, MARGINS: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    tokens = tl.load(token_ids + at, mask=inside, other=0) if REDUCED else at.to(tl.int64)
    scores = tl.load(logits + row * stride + at, mask=inside, other=float("-inf")).to(tl.float64)
    scores -= tl.load(highest + row)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        seed, choice, position = tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row)
        if REDUCED:
            words = _words(seed, choice, position, tokens)
        else:
            words = _words_in_order(seed, choice, position, block, BLOCK)
        scores = scores / temperature + _gumbel(words)
    score, index = tl.max(scores, 0, return_indices=True)
    to = row * tl.num_programs(1) + block
    tl.store(best + to, score)
    chosen = tl.arange(0, BLOCK) == index
    tl.store(where + to, tl.sum(tl.where(chosen, tokens, 0)))
    if MARGINS:
        tl.store(second + to, tl.max(tl.where(chosen, float("-inf"), scores), 0))


@triton.jit
def _best_of_row(
    best, second, where, temperatures, tokens, margins, blocks, BLOCK: tl.constexpr, MARGINS: tl.constexpr
):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    scores = tl.load(best + row * blocks + at, mask=at < blocks, other=float("-inf"))
    score, index = tl.max(scores, 0, return_indices=True)
    tl.store(tokens + row, tl.load(where + row * blocks + index))
    if MARGINS:
        seconds = tl.load(second + row * blocks + at, mask=at < blocks, other=float("-inf"))
        margin = score - tl.max(tl.where(at == index, seconds, scores), 0)
        temperature = tl.load(temperatures + row)
        tl.store(margins + row, margin * tl.where(temperature > 0.0, temperature, 1.0))


@triton.jit
def _philox(seed, choice, position, blocks):
    """Noise words of tokens 4b to 4b + 3 for every b of `blocks`, as noise.philox_blocks."""
    zero = (blocks * 0).to(tl.uint32)
    return tl.philox(seed, blocks.to(tl.uint32), zero + position.to(tl.uint32), zero + choice.to(tl.uint32), zero)


@triton.jit
def _words_in_order(seed, choice, position, block, BLOCK: tl.constexpr):
    """Of the BLOCK tokens of a block of columns."""
    w0, w1, w2, w3 = _philox(seed, choice, position, block * (BLOCK // 4) + tl.arange(0, BLOCK // 4))
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def _words(seed, choice, position, tokens):
    """Of any tokens."""
    w0, w1, w2, w3 = _philox(seed, choice, position, tokens >> 2)
    lane = tokens & 3
    return tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))


@triton.jit
def _gumbel(words):
    """As noise.to_gumbel."""
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    return -tl.log(-tl.log(uniform))

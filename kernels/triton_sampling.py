"""The law's token (DESIGN section 3) of many rows at once where the logits are: argmax of logit / temperature + noise.

The noise words are those of noise.py, and the arithmetic is sampling.py's in float64; what a logarithm's last bit can
change is nothing that a test could find. Knows no request.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from verdraft.kernels.draws import BAD, UNSURE, Draws, weight_of_one
from verdraft.kernels.torch_sampling import weights_of

_BLOCK: Final = 2048  # columns of one program


def law_tokens(logits: Tensor, draws: Draws, token_ids: Tensor | None = None, margins: Tensor | None = None) -> Tensor:
    """See draws.Sampler."""
    rows, columns = logits.shape
    highest = logits.amax(1).double()
    fine = highest.isfinite()
    blocks = triton.cdiv(columns, _BLOCK)
    best, second = logits.new_empty((2, rows, blocks), dtype=torch.float64)
    where = logits.new_empty((rows, blocks), dtype=torch.int64)
    found = logits.new_empty((rows,), dtype=torch.int64)
    row = (
        logits,
        draws.seeds if token_ids is None else token_ids,
        highest.where(fine, 0.0),
        draws.temperatures,
        draws.seeds,
        draws.choices,
        draws.positions,
    )
    if rows:
        shape = (columns, logits.stride(0))
        kind = {"BLOCK": _BLOCK, "REDUCED": token_ids is not None, "enable_fp_fusion": False}
        told = {"MARGINS": margins is not None}
        _best_of_block[(rows, blocks)](*row, best, second, where, *shape, **kind, **told)
        to = best if margins is None else margins
        block = triton.next_power_of_2(blocks)
        _best_of_row[(rows,)](best, second, where, draws.temperatures, found, to, blocks, BLOCK=block, **told)
        found = found.where(fine, BAD)
        if draws.limits is not None:
            mass = _mass_of_likeliest(logits, row[2], draws) if draws.most else found
            one = weight_of_one(columns)
            _best_kept[(rows,)](*row, draws.limits, mass, found, one, *shape, NEITHER=UNSURE, num_warps=16, **kind)
    return found if token_ids is None else token_ids[found].where(fine, BAD)


def _mass_of_likeliest(logits: Tensor, highest: Tensor, draws: Draws) -> Tensor:
    """Of the top_k of every row [R] int64, where that is on."""
    assert draws.limits is not None
    likeliest = logits.topk(min(draws.most, logits.shape[1]), 1).values
    weights = weights_of((likeliest.double() - highest[:, None]) / draws.temperatures[:, None], logits.shape[1])
    rank = torch.arange(weights.shape[1], device=weights.device)
    return weights.where(rank < draws.limits[:, :1], 0).sum(1)


@triton.jit
def _best_of_block(
    logits, token_ids, highest, temperatures, seeds, choices, positions, best, second, where, columns, stride,
    BLOCK: tl.constexpr, REDUCED: tl.constexpr, MARGINS: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    at, scores = _scores(logits + row * stride, tl.load(highest + row), temperature, block, columns, BLOCK)
    if temperature > 0.0:
        seed, choice, position = tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row)
        scores += _noise(token_ids, seed, choice, position, block, columns, BLOCK, REDUCED)
    score, index = tl.max(scores, 0, return_indices=True)
    to = row * tl.num_programs(1) + block
    tl.store(best + to, score)
    tl.store(where + to, block * BLOCK + index)
    if MARGINS:
        tl.store(second + to, tl.max(tl.where(at == block * BLOCK + index, float("-inf"), scores), 0))


@triton.jit
def _best_of_row(best, second, where, temperatures, found, margins, blocks, BLOCK: tl.constexpr, MARGINS: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    scores = tl.load(best + row * blocks + at, mask=at < blocks, other=float("-inf"))
    score, index = tl.max(scores, 0, return_indices=True)
    tl.store(found + row, tl.load(where + row * blocks + index))
    if MARGINS:
        seconds = tl.load(second + row * blocks + at, mask=at < blocks, other=float("-inf"))
        margin = score - tl.max(tl.where(at == index, seconds, scores), 0)
        temperature = tl.load(temperatures + row)
        tl.store(margins + row, margin * tl.where(temperature > 0.0, temperature, 1.0))


@triton.jit
def _best_kept(
    logits, token_ids, highest, temperatures, seeds, choices, positions, limits, masses, found, one, columns, stride,
    NEITHER: tl.constexpr, BLOCK: tl.constexpr, REDUCED: tl.constexpr,
):  # fmt: skip
    """What a row has found, if its limits keep that; else they keep nothing behind it in the ranking either, and the
    best before it is the next to be looked at, or there is NEITHER. The first of the ranking is always kept."""
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p, least = tl.load(limits + 4 * row), tl.load(limits + 4 * row + 1), tl.load(limits + 4 * row + 2)
    masked = tl.load(limits + 4 * row + 3) > 0.0
    column, high, temperature = tl.load(found + row), tl.load(highest + row), tl.load(temperatures + row)
    looking = (column >= 0) & ((top_k > 0.0) | (top_p < 1.0) | (least > float("-inf")))
    while looking:
        score = (tl.load(logits + row * stride + column).to(tl.float64) - high) / temperature
        rank, before, mass = _rank(logits + row * stride, high, temperature, score, column, one, columns, BLOCK)
        weight = (tl.exp(score) * one + 0.5).to(tl.int64)
        mass = tl.where(masked, before + weight, tl.where(top_k > 0.0, tl.load(masses + row), mass))
        kept = ((top_k == 0.0) | (rank < top_k)) & (score >= least)
        kept = kept & ((top_p == 1.0) | (before.to(tl.float64) < top_p * mass.to(tl.float64)))
        looking = (rank > 0) & (kept == 0)
        if looking & masked:
            column = column * 0 + NEITHER
            looking = looking & (masked == 0)
        elif looking:
            column = _best_before(
                logits + row * stride, token_ids, high, temperature, tl.load(seeds + row), tl.load(choices + row),
                tl.load(positions + row), score, column, columns, BLOCK, REDUCED,
            )  # fmt: skip
    tl.store(found + row, column)


@triton.jit
def _rank(logits, high, temperature, score, column, one, columns, BLOCK: tl.constexpr):
    """How many columns rank before this one, how much they weigh, and how much all do."""
    rank = column * 0
    before, mass = rank, rank
    for block in range(tl.cdiv(columns, BLOCK)):
        at, scores = _scores(logits, high, temperature, block, columns, BLOCK)
        weights = (tl.exp(scores) * one + 0.5).to(tl.int64)
        earlier = _earlier(scores, at, score, column)
        rank += tl.sum(earlier.to(tl.int64))
        before += tl.sum(tl.where(earlier, weights, 0))
        mass += tl.sum(weights)
    return rank, before, mass


@triton.jit
def _best_before(
    logits, token_ids, high, temperature, seed, choice, position, score, column, columns,
    BLOCK: tl.constexpr, REDUCED: tl.constexpr,
):  # fmt: skip
    """The best column of those that rank before this one."""
    found, best = column, tl.full((), float("-inf"), tl.float64)
    for block in range(tl.cdiv(columns, BLOCK)):
        at, scores = _scores(logits, high, temperature, block, columns, BLOCK)
        noisy = scores + _noise(token_ids, seed, choice, position, block, columns, BLOCK, REDUCED)
        highest, index = tl.max(
            tl.where(_earlier(scores, at, score, column), noisy, float("-inf")), 0, return_indices=True
        )
        found = tl.where(highest > best, block * BLOCK + index, found)
        best = tl.maximum(highest, best)
    return found


@triton.jit
def _earlier(scores, at, score, column):
    return (scores > score) | ((scores == score) & (at < column))


@triton.jit
def _scores(logits, high, temperature, block, columns, BLOCK: tl.constexpr):
    """The columns of a block, and their scores without noise."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float64) - high
    return at, scores / tl.where(temperature > 0.0, temperature, 1.0)


@triton.jit
def _noise(token_ids, seed, choice, position, block, columns, BLOCK: tl.constexpr, REDUCED: tl.constexpr):
    """Of the columns of a block."""
    if REDUCED:
        at = block * BLOCK + tl.arange(0, BLOCK)
        words = _words(seed, choice, position, tl.load(token_ids + at, mask=at < columns, other=0))
    else:
        words = _words_in_order(seed, choice, position, block, BLOCK)
    return _gumbel(words)


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

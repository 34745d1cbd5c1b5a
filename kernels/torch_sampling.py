"""The law's token (DESIGN section 3) of many rows at once where the logits are, in torch: the reference of
triton_sampling.py, and what there is where Triton is not. Knows no request."""

from typing import Final

import torch
from torch import Tensor

from verdraft.kernels.draws import BAD, UNSURE, Draws, weight_of_one

_M0, _M1, _W0, _W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85  # of Philox4x32-10, as in noise.py
_LOW: Final = 0xFFFFFFFF
_ROUNDS: Final = 10


def law_tokens(logits: Tensor, draws: Draws, token_ids: Tensor | None = None, margins: Tensor | None = None) -> Tensor:
    """See draws.Sampler."""
    columns = torch.arange(logits.shape[1], device=logits.device) if token_ids is None else token_ids
    highest = logits.amax(1, keepdim=True).double()
    fine = highest.isfinite()
    scores = logits.double() - highest.where(fine, 0.0)
    noisy = (draws.temperatures > 0.0)[:, None]
    heat = draws.temperatures[:, None].where(noisy, 1.0)
    scores /= heat
    kept = None if draws.limits is None else _kept(scores, draws.limits)
    scores = torch.where(noisy, scores + _gumbel(noise_words(draws, columns)), scores)
    if kept is not None and draws.limits is not None:
        scores = scores.where(kept | (draws.limits[:, 3:] > 0.0), -torch.inf)
    best = scores.argmax(1, keepdim=True)
    if margins is not None:
        others = scores.scatter(1, best, -torch.inf).amax(1, keepdim=True)
        margins.copy_(((scores.gather(1, best) - others) * heat)[:, 0])
    tokens = columns[best] if kept is None else columns[best].where(kept.gather(1, best), UNSURE)
    return tokens.where(fine, BAD)[:, 0]


def _kept(scores: Tensor, limits: Tensor) -> Tensor:  # [R, C], [R, 4] -> [R, C]
    """Which tokens the limits keep; all three keep a beginning of the ranking.

    Under a mask, fewer tokens rank before one that it allows, and all together weigh at least what these and itself do.
    """
    ranked, order = scores.sort(dim=1, descending=True, stable=True)
    top_k, top_p, least, masked = limits.T[:, :, None]
    rank = torch.arange(scores.shape[1], device=scores.device)
    kept = (top_k == 0.0) | (rank < top_k)
    mass = weights_of(ranked, scores.shape[1]).where(kept, 0)
    before = mass.cumsum(1) - mass
    total = torch.where(masked > 0.0, before + mass, mass.sum(1, keepdim=True))
    kept &= (top_p == 1.0) | (before < top_p * total) | (rank == 0)
    return torch.empty_like(kept).scatter_(1, order, kept & (ranked >= least))


def weights_of(scores: Tensor, columns: int) -> Tensor:  # [R, n] of `columns` -> [R, n] int64
    """Probabilities, but for a factor; see weight_of_one."""
    return (scores.exp() * weight_of_one(columns) + 0.5).long()


def noise_words(draws: Draws, tokens: Tensor) -> Tensor:
    """Words [R, C] of the tokens [C] int64 for every row, each below 2**32, as noise.philox_blocks."""
    blocks = (tokens >> 2).expand(draws.seeds.shape[0], -1)
    c0, c1, c2, c3 = blocks, draws.positions[:, None], draws.choices[:, None], torch.zeros_like(blocks)
    low, high = draws.seeds[:, None] & _LOW, draws.seeds[:, None] >> 32 & _LOW
    for i in range(_ROUNDS):
        a, b = c0 * _M0, c2 * _M1  # wraps above 2**63, which leaves all 64 bits right
        k0, k1 = low + i * _W0 & _LOW, high + i * _W1 & _LOW
        c0, c1, c2, c3 = (b >> 32 & _LOW) ^ c1 ^ k0, b & _LOW, (a >> 32 & _LOW) ^ c3 ^ k1, a & _LOW
    lane = tokens & 3
    return c0.where(lane == 0, c1.where(lane == 1, c2.where(lane == 2, c3)))


def _gumbel(words: Tensor) -> Tensor:
    """As noise.to_gumbel."""
    return -(-((words.double() + 0.5) * 2.0**-32).log()).log()

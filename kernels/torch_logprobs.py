"""Raw log-probabilities where the logits are: sampling.row_logprobs of many rows at once, in torch."""

import torch
from torch import Tensor

from verdraft.kernels.draws import weight_of_one
from verdraft.kernels.sampling import LOGPROB_FLOOR
from verdraft.kernels.torch_sampling import weights_of


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> Tensor:  # [S, V] float32, [S] -> [S, 1 + 2n] float64
    """Of a token in each row; then the ids of the n = min(top, V) likeliest, of equals the lower first, and theirs.

    NaN where a row's largest logit is not finite. The sum over a row is one of whole numbers, so it depends on no order
    and on no other row; it is that of the host but for less than a billionth.
    """
    highest = logits.amax(1, keepdim=True).double()
    mass = weights_of(logits.double() - highest, logits.shape[1]).sum(1, keepdim=True)
    total = highest.where(highest.isfinite(), torch.nan) + (mass.double() / weight_of_one(logits.shape[1])).log()
    ids = _likeliest(logits, min(top, logits.shape[1]))
    found = logits.gather(1, torch.cat((tokens.clamp(min=0)[:, None], ids), 1)) - total
    chosen, likeliest = found.clamp(LOGPROB_FLOOR, 0.0).split_with_sizes([1, ids.shape[1]], 1)
    return torch.cat((chosen, ids.double(), likeliest), 1)


def _likeliest(logits: Tensor, count: int) -> Tensor:  # [S, V] -> [S, count]
    """Ids of the largest. Keys that are all different leave no choice among equals: the bits of a logit in an order
    that is that of the numbers, then the id, lower ones first."""
    bits = (logits + 0.0).view(torch.int32).long()  # 0.0 and -0.0 are equal
    ordered = bits.where(bits >= 0, bits ^ 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (ordered << 32) - ids
    return keys.topk(count, 1).indices if count else keys[:, :0]

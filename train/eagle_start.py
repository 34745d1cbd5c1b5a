"""Where training an EAGLE3 head starts: what least squares can say without a single step."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from verdraft.train.eagle_net import Chains, EagleNet
from verdraft.train.eagle_rows import Rows

BATCH = 4000  # anchors
ENOUGH = 100_000  # anchors; the unknowns of a row of fc and o_proj are a few thousand
LOOK = 1.05  # how sharply heads look at their own row at first: it gets about nine tenths of their attention


@torch.no_grad()
def solve(net: EagleNet, rows: Rows, ridge: float, seed: int) -> None:
    """Weights with which the first step comes closest to what the target's head reads one row later.

    Attention starts with heads that look at their own row and pass its embedding on; fc and o_proj are solved for, and
    then, behind random gates, the MLP's second half. `ridge` is relative to the features' mean square.
    """
    draw = torch.Generator().manual_seed(seed)
    _look_at_own_row(net, draw)
    mlp, width = net.midlayer.mlp, net.fc.in_features
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight.copy_(_random(linear.weight.shape, draw))
    mix = _least_squares(((torch.cat(read, -1), wanted) for read, wanted in _features(net, rows)), ridge)
    net.fc.weight.copy_(mix[:, :width])
    net.midlayer.self_attn.o_proj.weight.copy_(mix[:, width:])

    def missing() -> Iterator[tuple[Tensor, Tensor]]:
        for read, wanted in _features(net, rows):
            hidden = torch.cat(read, -1) @ mix.T
            yield mlp.gated(net.midlayer.post_attention_layernorm(hidden)), wanted - hidden

    mlp.down_proj.weight.copy_(_least_squares(missing(), ridge))
    net.norm.weight.fill_(rows.final[::100].float().square().mean().sqrt())


def _random(shape: torch.Size, draw: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=draw) / math.sqrt(shape[-1])


def _look_at_own_row(net: EagleNet, draw: torch.Generator) -> None:
    """Equal projections of normed embeddings meet in no key as in their own; values keep as much as fits of them."""
    attention, hidden = net.midlayer.self_attn, net.config.hidden_size
    keys = _random(torch.Size((attention.kv_heads, attention.dim, hidden)), draw) * LOOK
    queries = keys.repeat_interleave(net.config.num_heads // attention.kv_heads, 0)
    values, _ = torch.linalg.qr(torch.randn(attention.v_proj.out_features, hidden, generator=draw).T)
    for linear, weight in (
        (attention.q_proj, queries.flatten(0, 1)),
        (attention.k_proj, keys.flatten(0, 1)),
        (attention.v_proj, values.T),
    ):
        linear.weight.zero_()
        linear.weight[: len(weight), :hidden] = weight.to(linear.weight)


def _features(net: EagleNet, rows: Rows) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
    """What fc and o_proj read at anchors, and what the target's head read one row later."""
    device, done = net.fc.weight.device, 0
    for chosen in rows.groups(range(len(rows.lengths)), BATCH):
        part = rows.part(chosen)
        anchors = part.anchors.to(device)
        aux = net.normed(part.aux.to(device))
        embedded = net.embedding[part.next.to(device)]
        inputs = net.midlayer.inputs(embedded, torch.zeros_like(embedded))
        context = net.context(inputs, part.lengths.tolist())
        chains = Chains(anchors, aux[anchors])
        attended = net.midlayer.self_attn(inputs[anchors], context.places[anchors], context, chains)
        yield (aux[anchors], attended), part.final[part.anchors + 1].to(device).float()
        done += len(anchors)
        if done >= ENOUGH:
            break


def _least_squares(pairs: Iterator[tuple[Tensor, Tensor]], ridge: float) -> Tensor:  # [out, in]
    """The weight that maps features [n, in] to what is wanted [n, out]."""
    gram = cross = torch.zeros(())
    for features, wanted in pairs:
        gram, cross = gram.to(features) + features.T @ features, cross.to(features) + features.T @ wanted
    gram.diagonal().add_(ridge * gram.diagonal().mean())
    solved: Tensor = torch.linalg.solve(gram, cross)
    return solved.T

"""What a trained EAGLE3 head is worth on held-out prompts: acceptance by position in chains along greedy text."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verdraft.train.eagle_fit import mixed_precision, unrolled
from verdraft.train.eagle_net import EagleNet
from verdraft.train.eagle_rows import Rows

DEPTH = 8  # steps
BATCH = 2000  # anchors


def judge(net: EagleNet, rows: Rows, sources: Sequence[str]) -> dict[str, Any]:
    """Figures for the record, over chains of DEPTH tokens from every greedy row of the model's own; `sources[s]` is
    where prompt s comes from.

    `acceptance`: of position i, among the chains that were right before. `length`: tokens accepted on average.
    """
    text = rows.part(torch.nonzero(rows.greedy).squeeze(1).tolist())
    judged = [_right(net, text.part(chosen)) for chosen in text.groups(range(len(text.lengths)), BATCH)]
    if not judged:
        return {"rows": 0}
    right, numbers = (torch.cat(column) for column in zip(*judged, strict=True))
    alive = right.float().cumprod(1)  # [n, DEPTH]
    before = torch.cat([torch.ones(len(alive), 1), alive[:, :-1]], 1)
    origin = [sources[number] for number in numbers.tolist()]
    of_source = {name: torch.tensor([source == name for source in origin]) for name in sorted(set(origin))}
    return {
        "rows": len(alive),
        "coverage": _share(rows.first[rows.own] >= 0),
        "acceptance": [_share(alive[:, i][before[:, i] > 0]) for i in range(DEPTH)],
        "length": _share(alive.sum(1)),
        "length_by_source": {name: _share(alive[mine].sum(1)) for name, mine in of_source.items()},
    }


@torch.no_grad()
def _right(net: EagleNet, rows: Rows) -> tuple[Tensor, Tensor]:
    """Which guesses of the chains were the target's [n, DEPTH], and whose prompt each chain follows [n]."""

    anchors = rows.own_anchors
    anchors, right = anchors[rows.room(anchors) >= DEPTH], []
    with mixed_precision(net):
        for index, chains in enumerate(unrolled(net, rows, anchors, DEPTH, lambda chains, _: chains.anchors >= 0), 1):
            right.append(net.logits(chains).argmax(-1).cpu() == rows.first[anchors + index])
    return torch.stack(right, 1), rows.numbers[rows.owners(anchors)]


def _share(values: Tensor) -> float:
    return round(float(values.float().mean()), 4) if len(values) else 0.0

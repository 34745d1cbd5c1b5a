"""An exit head that can be trained, in torch; its tensors are what model/exit_file.py stores and ExitHead computes."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verdraft.model.exit_file import AdapterWeights


class Adapter(nn.Module):
    """Norm, a linear map beside a gated MLP, norm, and a projection whose rows are the target's own and stay fixed."""

    projection: Tensor  # [R, hidden]

    def __init__(self, projection: Tensor, inner: int, eps: float, dropout: float, seed: int) -> None:
        """`projection` is [R, hidden]; `inner` is the MLP's width, of whose inputs and outputs training drops some."""
        super().__init__()
        hidden, draw = projection.shape[1], torch.Generator().manual_seed(seed)
        self.eps = eps
        self.dropout = dropout
        self.norm = nn.Parameter(torch.ones(hidden))
        self.gate_up = nn.Parameter(torch.randn(2 * inner, hidden, generator=draw) * hidden**-0.5)
        self.skip = nn.Parameter(torch.eye(hidden))
        self.down = nn.Parameter(torch.zeros(hidden, inner))
        self.out_norm = nn.Parameter(torch.ones(hidden))
        self.register_buffer("projection", projection)

    def forward(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, R]
        normed, gated = self.features(hidden)
        adapted = F.linear(normed, self.skip) + F.linear(gated, self.down)
        return F.linear(F.rms_norm(adapted, self.norm.shape, self.out_norm, self.eps), self.projection)

    def features(self, hidden: Tensor) -> tuple[Tensor, Tensor]:  # [n, hidden] -> [n, hidden], [n, inner]
        """What the linear map and the MLP's second half read."""
        normed = F.dropout(F.rms_norm(hidden, self.norm.shape, self.norm, self.eps), self.dropout, self.training)
        gate, up = F.linear(normed, self.gate_up).chunk(2, -1)
        return normed, F.dropout(F.silu(gate) * up, self.dropout, self.training)

    @torch.no_grad()
    def solve(self, hidden: Iterable[Tensor], final: Iterable[Tensor], ridge: float) -> None:
        """Start where least squares ends: `skip` and `down` that map streams [n, hidden] to what the target's head
        reads [n, hidden], with the gates as they are. `ridge` is relative to the features' mean square."""
        width = self.skip.shape[1] + self.down.shape[1]
        gram, cross = self.skip.new_zeros(width, width), self.skip.new_zeros(width, self.skip.shape[0])
        squares = rows = 0.0
        for stream, wanted in zip(hidden, final, strict=True):
            features = torch.cat(self.features(stream), -1)
            gram.addmm_(features.T, features)
            cross.addmm_(features.T, wanted)
            squares, rows = squares + float(wanted.square().mean(-1).sum()), rows + len(wanted)
        gram.diagonal().add_(ridge * gram.diagonal().mean())
        solved = torch.linalg.solve(gram, cross).T
        self.skip.copy_(solved[:, : self.skip.shape[1]])
        self.down.copy_(solved[:, self.skip.shape[1] :])
        self.out_norm.fill_((squares / rows) ** 0.5)

    def weights(self) -> AdapterWeights:
        """What is stored."""
        wide = torch.cat([self.gate_up, self.skip])
        parts = (self.norm, wide, self.down, self.out_norm)
        return AdapterWeights(*(part.detach().cpu().clone() for part in parts))

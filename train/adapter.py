"""An exit head that can be trained, in torch; its tensors are what model/exit_file.py stores and ExitHead computes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verdraft.model.exit_file import AdapterWeights


class Adapter(nn.Module):
    """Norm, a linear map beside a gated MLP, norm, and a projection whose rows are the target's own and stay fixed."""

    projection: Tensor  # [R, hidden]

    def __init__(self, scale: Tensor, projection: Tensor, inner: int, eps: float, seed: int) -> None:
        """The outer norm begins as `scale` [hidden]; `projection` is [R, hidden]; `inner` is the MLP's width."""
        super().__init__()
        hidden, draw = scale.numel(), torch.Generator().manual_seed(seed)
        self.eps = eps
        self.norm = nn.Parameter(torch.ones(hidden))
        self.gate_up = nn.Parameter(torch.randn(2 * inner, hidden, generator=draw) * hidden**-0.5)
        self.skip = nn.Parameter(torch.eye(hidden))
        self.down = nn.Parameter(torch.zeros(hidden, inner))
        self.out_norm = nn.Parameter(scale.clone())
        self.register_buffer("projection", projection)

    def forward(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, R]
        normed = F.rms_norm(hidden, self.norm.shape, self.norm, self.eps)
        gate, up = F.linear(normed, self.gate_up).chunk(2, -1)
        adapted = F.linear(normed, self.skip) + F.linear(F.silu(gate) * up, self.down)
        return F.linear(F.rms_norm(adapted, self.norm.shape, self.out_norm, self.eps), self.projection)

    def weights(self) -> AdapterWeights:
        """What is stored."""
        wide = torch.cat([self.gate_up, self.skip])
        parts = (self.norm, wide, self.down, self.out_norm)
        return AdapterWeights(*(part.detach().cpu().clone() for part in parts))

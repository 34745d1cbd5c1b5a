"""What waits between two segments: hidden states that the lower one has computed and the upper one has not taken."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class Boundary:
    """Rows of one sequence at positions [computed[s + 1], computed[s]), oldest first."""

    chunks: list[Tensor] = field(default_factory=list)  # each [n, hidden]

    def __len__(self) -> int:
        return sum(len(chunk) for chunk in self.chunks)

    def push(self, rows: Tensor) -> None:  # [n, hidden]
        """The lower segment has computed `n` more positions."""
        self.chunks.append(rows)

    def keep(self, count: int) -> None:
        """Drop all but the first `count` rows: the others belong to rejected tokens."""
        kept: list[Tensor] = []
        for chunk in self.chunks:
            if count <= 0:
                break
            kept.append(chunk[:count])
            count -= len(chunk)
        self.chunks = kept

"""A draft while a model makes it, level by level (PAPERS 4.4). Knows tokens and probabilities, no model."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from verdraft.spec.draft import Draft, Source


@dataclass(frozen=True, slots=True)
class Branch:
    """A token that may follow, what its drafter claims for it and what that is worth."""

    token: int
    claim: float
    prob: float  # in (0, 1)


@dataclass(slots=True)
class Growing:
    """`topk` children of every node that is looked behind, and as many nodes of a level are; 1: a chain."""

    depth: int  # levels at most
    topk: int
    limit: int  # tokens of the draft at most, and nodes that are looked behind
    ends: frozenset[int]  # tokens behind which nothing is worth drafting
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)  # of whole paths
    claims: list[float] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [-1])  # nodes to look behind next; -1: the committed text
    looked: list[int] = field(default_factory=list)  # nodes that were looked behind, without the committed text
    num_levels: int = 0

    def path(self, node: int) -> list[int]:
        """Tokens from the committed text to `node`."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def branch(self, branches: Sequence[Sequence[Branch]]) -> None:
        """What may follow each node of the frontier; the likeliest of them all are the next frontier."""
        first = len(self.tokens)
        for node, children in zip(self.frontier, branches, strict=True):
            before = 1.0 if node < 0 else self.probs[node]
            self.tokens += [child.token for child in children]
            self.parents += [node] * len(children)
            self.probs += [before * child.prob for child in children]
            self.claims += [child.claim for child in children]
        self.looked += [node for node in self.frontier if node >= 0]
        self.num_levels += 1
        self.frontier = self._next(first) if self.num_levels < self.depth else []

    def _next(self, first: int) -> list[int]:
        level = [node for node in range(first, len(self.tokens)) if self.tokens[node] not in self.ends]
        level.sort(key=lambda node: -self.probs[node])
        return sorted(level[: min(self.topk, self.limit - len(self.looked))])

    @property
    def hope(self) -> float:
        """The chance that what is accepted reaches the frontier."""
        return sum(self.probs[node] for node in self.frontier)

    def draft(self, source: Source) -> tuple[Draft, tuple[float, ...]]:
        """The likeliest `limit` tokens, the likeliest first, and their claims."""
        nodes = sorted(range(len(self.tokens)), key=lambda node: -self.probs[node])[: self.limit]
        place = {node: i for i, node in enumerate(nodes)} | {-1: -1}
        draft = Draft(
            tokens=tuple(self.tokens[node] for node in nodes),
            source=source,
            probs=tuple(self.probs[node] for node in nodes),
            parents=tuple(place[self.parents[node]] for node in nodes) if self.topk > 1 else (),
        )
        return draft, tuple(self.claims[node] for node in nodes)

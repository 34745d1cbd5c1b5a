"""A draft and the one protocol that every draft source follows. Token ids in, token ids out; no Request is known."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias, get_args

Source: TypeAlias = Literal["prediction", "suffix", "early_exit", "eagle", "grammar"]
SOURCES: tuple[Source, ...] = get_args(Source)


class Draft(NamedTuple):
    """Proposed tokens as flat arrays; a chain when `parents` is empty, else parents[i] < i (-1: the committed text).

    In a tree a node is a token, its path the tokens that lead to it. Likely nodes come first, so that a beginning of
    the arrays is the best smaller tree.
    """

    tokens: tuple[int, ...] = ()
    source: Source = "suffix"
    probs: tuple[float, ...] = ()  # estimated probability that token i and its path are accepted
    match_len: int = 0  # tokens of context that the proposal continues
    parents: tuple[int, ...] = ()
    least: int = 0  # so many tokens are verified whatever they cost

    @property
    def score(self) -> float:
        """Expected number of accepted tokens (PAPERS: suffix score, the sum of path probabilities)."""
        return sum(self.probs)

    def trim(self, limit: int) -> "Draft":
        """The first `limit` tokens; parents come before their children, so these are a chain or a tree too."""
        if limit >= len(self.tokens) and self.least <= limit:
            return self
        tokens, probs, parents = self.tokens[:limit], self.probs[:limit], self.parents[:limit]
        return Draft(tokens, self.source, probs, self.match_len, parents, min(self.least, limit))

    def expecting(self, probs: tuple[float, ...]) -> "Draft":
        """The same with these probabilities."""
        return Draft(self.tokens, self.source, probs, self.match_len, self.parents, self.least)

    @property
    def depths(self) -> list[int]:
        """Of every token, the length of its path: 1 behind the committed text."""
        depths: list[int] = []
        for parent in self.parents or range(-1, len(self.tokens) - 1):
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def child(self, node: int, token: int) -> int | None:
        """The node that continues `node` (-1: the committed text) with `token`."""
        if not self.parents:
            return node + 1 if node + 1 < len(self.tokens) and self.tokens[node + 1] == token else None
        found = (i for i in range(node + 1, len(self.tokens)) if self.parents[i] == node and self.tokens[i] == token)
        return next(found, None)

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The nodes that `tokens` lead through, as far as there are such."""
        nodes = [-1]
        for token in tokens:
            if (node := self.child(nodes[-1], token)) is None:
                break
            nodes.append(node)
        return nodes[1:]


EMPTY = Draft()
ASK = 1 << 30  # a clue: just ask


class Drafter(Protocol):
    """One sequence's draft source. start() once, extend() with every committed token, stop() once; misuse raises."""

    def start(self, prompt: Sequence[int]) -> None:
        """Begin with the prompt's ids (and, after preemption, nothing more: committed tokens stay known)."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that were committed since the last call."""
        ...

    def clue(self) -> int:
        """How much context the next draft stands on, tokens, without looking for it: 0 when there will be none, ASK
        when the draft costs no more than the clue."""
        ...

    def propose(self, limit: int) -> Draft:
        """A draft of at most `limit` tokens that continues what is committed; EMPTY when there is none."""
        ...

    def stop(self) -> None:
        """The sequence has ended: feed shared stores, free memory."""
        ...


class NoDrafter:
    """Proposes nothing: decoding is the verification of an empty draft."""

    def start(self, prompt: Sequence[int]) -> None:
        pass

    def extend(self, tokens: Sequence[int]) -> None:
        pass

    def clue(self) -> int:
        return 0

    def propose(self, limit: int) -> Draft:
        return EMPTY

    def stop(self) -> None:
        pass


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter)

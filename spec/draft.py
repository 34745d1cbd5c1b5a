"""A draft and the one protocol that every draft source follows. Token ids in, token ids out; no Request is known."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias, get_args

Source: TypeAlias = Literal["prediction", "suffix", "early_exit", "eagle", "grammar"]
SOURCES: tuple[Source, ...] = get_args(Source)


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens as flat arrays; a chain when `parents` is empty, else parents[i] < i (-1 = the root)."""

    tokens: tuple[int, ...] = ()
    source: Source = "suffix"
    probs: tuple[float, ...] = ()  # estimated probability that tokens[:i+1] is accepted
    match_len: int = 0  # tokens of context that the proposal continues
    parents: tuple[int, ...] = ()
    least: int = 0  # so many tokens are verified whatever they cost

    @property
    def score(self) -> float:
        """Expected number of accepted tokens (PAPERS: suffix score, the sum of path probabilities)."""
        return sum(self.probs)

    def trim(self, limit: int) -> "Draft":
        """The first `limit` tokens of a chain."""
        return replace(self, tokens=self.tokens[:limit], probs=self.probs[:limit], least=min(self.least, limit))


EMPTY = Draft()


class Drafter(Protocol):
    """One sequence's draft source. start() once, extend() with every committed token, stop() once; misuse raises."""

    def start(self, prompt: Sequence[int]) -> None:
        """Begin with the prompt's ids (and, after preemption, nothing more: committed tokens stay known)."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that were committed since the last call."""
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

    def propose(self, limit: int) -> Draft:
        return EMPTY

    def stop(self) -> None:
        pass


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter)

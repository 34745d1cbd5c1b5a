"""Judging suffix drafts by the text that was committed later, whoever drafted it: every draft becomes a labelled state,
also one that was not chosen or was trimmed (HVD's label by replay, PAPERS 1.3, taken while serving)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verdraft.spec.draft import common_length
from verdraft.spec.features import Floats, RecentHistory


class LabelledState(NamedTuple):
    """What was known of a draft, what was predicted of it, and what became of it."""

    features: Floats  # [F]
    drafted: int
    accepted: int  # tokens that the committed text begins with
    predicted: float  # mean accepted length


@dataclass(slots=True, eq=False)
class _Open:
    """A draft of which the first `agreed` tokens were committed and the others are not judged yet."""

    tokens: tuple[int, ...]
    features: Floats
    predicted: float
    agreed: int = 0

    def judge(self, committed: Sequence[int]) -> bool:
        """Whether its fate is known now."""
        expected = self.tokens[self.agreed : self.agreed + len(committed)]
        right = common_length(expected, committed)
        self.agreed += right
        return right < len(committed) or self.agreed == len(self.tokens)


class Hindsight:
    """One sequence's open drafts and what became of the earlier ones. A draft's cycle comes before its commit."""

    def __init__(self) -> None:
        self.history = RecentHistory()
        self._open: list[_Open] = []

    def watch(self, tokens: tuple[int, ...], features: Floats, predicted: float) -> None:
        """The suffix source proposed `tokens` [at least one] as what comes next; `features` [F] is its phi."""
        self._open.append(_Open(tokens, features, predicted))

    def commit(self, tokens: Sequence[int]) -> list[LabelledState]:
        """Tokens that the sequence goes on with, in whatever pieces; the drafts whose fate they decide."""
        if not tokens or not self._open:
            return []
        judged = [draft for draft in self._open if draft.judge(tokens)]
        self._open = [draft for draft in self._open if draft not in judged] if judged else self._open
        for draft in judged:
            self.history.judge(len(draft.tokens), draft.agreed)
        return [LabelledState(draft.features, len(draft.tokens), draft.agreed, draft.predicted) for draft in judged]

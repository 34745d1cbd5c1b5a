"""One step's work: for each chosen sequence, which tokens the pass takes."""

from dataclasses import dataclass

from verdraft.scheduler.sequence import Sequence
from verdraft.spec.draft import EMPTY, Draft


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens [start, start + num_tokens) of one sequence, the last len(draft) of them proposed ones."""

    seq: Sequence
    start: int
    num_tokens: int
    draft: Draft = EMPTY

    @property
    def yields(self) -> bool:
        """The pass reaches the newest known token, so its logits decide the next one."""
        return self.start + self.num_tokens - len(self.draft.tokens) == len(self.seq.tokens)

    @property
    def tokens(self) -> list[int]:
        known = self.seq.tokens[self.start : self.start + self.num_tokens - len(self.draft.tokens)]
        return [*known, *self.draft.tokens]

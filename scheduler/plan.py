"""One step's work: for each chosen sequence, which tokens the pass takes."""

from typing import Final, NamedTuple

from verdraft.scheduler.sequence import Sequence
from verdraft.spec.draft import EMPTY, Draft

UNKNOWN: Final = -1  # a token that a pass under way will find


class Work(NamedTuple):
    """Tokens [start, start + num_tokens) of one sequence, the last len(draft) of them proposed ones."""

    seq: Sequence
    start: int
    num_tokens: int
    draft: Draft = EMPTY

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self.start + self.num_tokens

    def owed(self, segment: int) -> int:
        """Tokens that a pass over this segment takes: [computed[segment], end) (DESIGN section 4)."""
        return self.end - self.seq.computed[segment]

    @property
    def yields(self) -> bool:
        """The pass reaches the newest known token, so its logits decide the next one."""
        return self.start + self.num_tokens - len(self.draft.tokens) == len(self.seq.tokens)

    @property
    def unread(self) -> list[int]:
        """The tokens that the first segment has not computed: known ones, then drafted ones."""
        first, drafted = self.seq.computed[0], self.draft.tokens
        known = self.end - len(drafted)
        tokens = self.seq.tokens[first:known]
        return [*tokens, *drafted[max(0, first - known) :]] if drafted else tokens

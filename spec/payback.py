"""What a model that stops drafting by itself brought one sequence lately, and so what it may bring next.

Knows counts only. Part of the draft side: free to be wrong.
"""

from dataclasses import dataclass, field

from verdraft.spec.agreement import Agreement

_MEMORY = 0.9  # weight of the earlier drafts when the next one comes: about the last ten count


@dataclass(slots=True)
class Payback:
    """Means over recent drafts. A draft of which nothing was worth verifying counts too."""

    accepted: float = 0.6  # tokens; before the first draft a guess that is worth a try where rows are cheap
    verified: float = 1.5  # tokens
    levels: float = 2.0  # that the model took to draft
    num_drafts: int = 0
    num_unused: int = 0  # chances to draft since the last draft
    followed: bool = True  # whether what the model needs is kept; else it cannot draft
    agreement: Agreement = field(default_factory=Agreement)

    def fresh(self) -> "Payback":
        """One for another sequence, which expects what this one has seen until it knows better."""
        agreement = Agreement(typical=self.agreement)
        return Payback(self.accepted, self.verified, self.levels, followed=self.followed, agreement=agreement)

    def drafted(self, levels: int) -> None:
        """The model went so many levels deep."""
        self.levels = _MEMORY * self.levels + (1 - _MEMORY) * levels
        self.num_drafts += 1
        self.num_unused = 0

    def learn(self, verified: int, depth: int, accepted: int) -> None:
        """Of a draft so many tokens, on paths of at most `depth`, were verified, and so many accepted."""
        self.verified = _MEMORY * self.verified + (1 - _MEMORY) * verified
        self.accepted = _MEMORY * self.accepted + (1 - _MEMORY) * accepted
        self.agreement.learn(depth, accepted)

"""Whether the exit at L_i should look at other sources' drafts before the full model does: only where that pays.

Knows verdicts and seconds. What L_i cuts off is never replaced, so it is free to be wrong.
"""

from collections.abc import Sequence

from verdraft.spec.agreement import Agreement
from verdraft.spec.exit_costs import ExitCosts

MIN_LEN = 3  # shorter drafts are hardly worth a look
TRIAL_EVERY = 64  # drafts of which one is looked at only to learn what L_i knows


class Pruning:
    """Learns what L_i lets through of right and of wrong tokens, from drafts that it saw and the full model judged."""

    def __init__(self, trial_every: int = TRIAL_EVERY) -> None:
        self.trial_every = trial_every
        self.right, self.wrong = Agreement(), Agreement()  # shares let through; equal at first, so nothing is pruned
        self._num_seen = 0

    def wants_trial(self) -> bool:
        """Whether this draft is to be looked at without being cut; once in a while."""
        self._num_seen += 1
        return self._num_seen % self.trial_every == 0

    def pays(self, costs: ExitCosts, probs: Sequence[float], rows: int) -> bool:
        """Whether cutting a draft of these path probabilities brings more tokens a second than verifying it whole.
        `rows` tokens are verified beside it."""
        if self.wrong.rate >= 0.8 * self.right.rate:
            return False
        whole = (1.0 + sum(probs)) / max(costs.full.of(rows + len(probs)), 1e-9)
        accepted, kept, before, path = 0.0, 0.0, 1.0, 1.0
        right = 1.0  # chance that everything so far was right and let through
        for prob in probs:
            hope = prob / before if before else 0.0
            right *= hope * self.right.rate
            path *= hope * self.right.rate + (1.0 - hope) * self.wrong.rate
            accepted, kept, before = accepted + right, kept + path, prob
        return (1.0 + accepted) / costs.pruned(len(probs) + 1, rows, rows + round(kept)) > whole

    def learn(self, verdicts: Sequence[bool], accepted: int) -> None:
        """What L_i said of a draft's tokens, and how many of them the full model accepted."""
        for verdict in verdicts[:accepted]:
            self.right.learn(1, int(verdict))
        for verdict in verdicts[accepted : accepted + 1]:
            self.wrong.learn(1, int(verdict))

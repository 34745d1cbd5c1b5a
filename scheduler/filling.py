"""Fills the windows of many sequences in lockstep with the model's own early exits (DESIGN section 4).

Everything here is draft side: it may be wrong, but what it leaves in the KV pool is the target's own (the lower
segments of a drafted token are computed once, and the full pass goes on from there).
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from verdraft.model.exit_head import Exits
from verdraft.scheduler.hearing import Asked, Guess, Listener
from verdraft.scheduler.passed import Rows
from verdraft.scheduler.plan import Work
from verdraft.scheduler.runner import Runner
from verdraft.scheduler.sequence import Sequence
from verdraft.scheduler.verifier import NO_TOKEN, Law, accept
from verdraft.spec.draft import Draft, common_length
from verdraft.spec.window import Window

PLAUSIBLE = 3.0  # logits behind the likeliest token: a twentieth of its probability


@dataclass(slots=True)
class Filling:
    """A sequence and the window that it is getting. `held`, a beginning of the window, is pushed to the sequence."""

    seq: Sequence
    window: Window
    held: list[int] = field(default_factory=list)

    def hold(self, tokens: Seq[int]) -> None:
        """Push exactly these tokens of the window to the sequence, for penalties and grammar."""
        common = common_length(self.held, tokens)
        for _ in self.held[common:]:
            self.seq.pop()
        for token in tokens[common:]:
            self.seq.push(token)
        self.held = list(tokens)

    def work(self) -> Work:
        """Everything known and drafted; what of it is computed already, each segment knows."""
        start, drafted = self.seq.computed[-1], tuple(self.window.tokens)
        return Work(self.seq, start, len(self.seq.tokens) + len(drafted) - start, Draft(drafted))


class WindowFiller:
    """Runs drafting rounds and checks; owns no state of sequences."""

    def __init__(self, exits: Exits, runner: Runner, law: Law) -> None:
        self.runner, self.law = runner, law
        self._heads = [Listener(head, runner.device, runner.model.device) for head in exits.heads]

    @property
    def _draft(self) -> Listener:
        return self._heads[0]

    @property
    def _check(self) -> Listener:
        return self._heads[1]

    def fill(self, seqs: Seq[Sequence], limits: Seq[int]) -> list[Draft]:
        """A draft of at most limits[i] > 0 tokens for each decoding sequence, which has blocks for them."""
        fillings = [
            Filling(seq, Window(seq.cycle, limit, self.law.ends(seq))) for seq, limit in zip(seqs, limits, strict=True)
        ]
        try:
            self._fill(fillings)
        finally:
            for filling in fillings:
                filling.hold(())
        return [self._draft_of(filling) for filling in fillings]

    def judge(self, seqs: Seq[Sequence]) -> list[list[bool]]:
        """What L_i thinks of each token of the sequences' drafts; they have blocks for them. Changes no draft."""
        works = [Work(seq, seq.computed[-1], 1 + len(seq.draft.tokens), seq.draft) for seq in seqs]
        hidden, counts = self._run(works, depth=2)
        first = zip(works, _starts(counts), strict=True)
        rows = [start + i for work, start in first for i in range(len(work.draft.tokens))]
        tokens = list(chain.from_iterable(work.draft.tokens for work in works))
        verdicts = iter(self._check.behind(hidden, rows, tokens) <= PLAUSIBLE)
        return [[bool(next(verdicts)) for _ in work.draft.tokens] for work in works]

    def _draft_of(self, filling: Filling) -> Draft:
        tokens = tuple(filling.window.tokens)
        return Draft(tokens, "early_exit", filling.seq.agreement.probs(len(tokens)))

    def _fill(self, fillings: list[Filling]) -> None:
        while fillings:
            while drafting := [filling for filling in fillings if filling.window.wants_draft]:
                self._draft_round(drafting)
            checking = [filling for filling in fillings if filling.window.wants_check]
            if checking:
                self._check_round(checking)
            fillings = [filling for filling in fillings if not filling.window.closed]

    def _draft_round(self, fillings: list[Filling]) -> None:
        """One more token for each at L_d."""
        hidden, counts = self._pass(fillings, depth=1)
        last = np.cumsum(counts) - 1
        asked = [Asked(row, one.seq, len(one.window.tokens)) for row, one in zip(last.tolist(), fillings, strict=True)]
        for filling, said in zip(fillings, self._draft.guesses(hidden, asked), strict=True):
            window = filling.window
            filling.hold(window.tokens)
            try:
                token = self._token(self._draft, filling.seq, len(window.tokens), said)
            except NO_TOKEN:  # at a head of few tokens, or one that fails
                window.closed = True
            else:
                window.draft(token, _sure(self._draft, window, token, said))

    def _check_round(self, fillings: list[Filling]) -> None:
        """L_i's own tokens as far as L_d agrees, and one more."""
        hidden, counts = self._pass(fillings, depth=2)
        asked = [
            Asked(start + j, one.seq, one.window.num_checked + j)
            for one, start, count in zip(fillings, _starts(counts), counts, strict=True)
            for j in range(count)
        ]
        said = iter(self._check.guesses(hidden, asked))
        for filling, count in zip(fillings, counts, strict=True):
            self._check_one(filling, list(islice(said, count)))

    def _check_one(self, filling: Filling, said: list[Guess | Rows]) -> None:
        """said[j] belongs to the checked tokens and the first j unchecked ones."""
        seq, window, head = filling.seq, filling.window, self._check
        ahead, unchecked = window.num_checked, window.unchecked
        filling.hold(window.tokens[:ahead])
        try:
            tokens = accept(seq, Draft(unchecked), lambda j, _: self._token(head, seq, ahead + j, said[j]))
        except NO_TOKEN:
            tokens = []
        sure = [_sure(head, window, token, one) for token, one in zip(tokens, said, strict=False)]
        window.check(tokens, sure)
        # The last of L_i's tokens is not computed yet, even where L_d had drafted another one for its place.
        agreed = max(0, len(tokens) - 1)
        seq.inner.learn(len(unchecked), agreed)
        seq.roll_back(len(seq.tokens) + min(ahead + agreed, len(window.tokens)))

    def _pass(self, fillings: list[Filling], depth: int) -> tuple[Tensor, list[int]]:
        """Hidden states behind `depth` segments, and how many rows of them each gets."""
        return self._run([filling.work() for filling in fillings], depth)

    def _run(self, works: list[Work], depth: int) -> tuple[Tensor, list[int]]:
        counts = [work.owed(depth - 1) for work in works]
        found = self.runner.run(works, depth)
        for work, rows in zip(works, found.split_with_sizes(counts), strict=True):
            work.seq.advance(depth, work.end, rows)
        return self.runner.stream(found), counts

    def _token(self, head: Listener, seq: Sequence, ahead: int, said: Guess | Rows) -> int:
        """The law's token at this exit: the same noise and the same parameters as the target's, by position."""
        if isinstance(said, Guess):
            return said.known()
        best = int(head.token_ids[said.argmax()])
        return self.law.token(seq, ahead, best, lambda: self._spread(said, head.token_ids))

    def _spread(self, row: Rows, token_ids: NDArray[np.int64]) -> Rows:
        full = np.full(self.runner.model.config.vocab_size, -np.inf, np.float32)
        full[token_ids] = row
        return full


def _sure(head: Listener, window: Window, token: int, said: Guess | Rows) -> bool:
    """Whether the head itself, without the request's parameters, gives its token enough probability."""
    confidence = window.cycle.confidence
    if confidence <= 0.0:
        return True
    if isinstance(said, Guess):
        return said.prob >= confidence
    chosen = said[np.searchsorted(head.token_ids, token)]
    return bool(confidence * np.exp(said - chosen).sum() <= 1.0)


def _starts(counts: list[int]) -> list[int]:
    """The first row of each."""
    return [0, *accumulate(counts)][:-1]

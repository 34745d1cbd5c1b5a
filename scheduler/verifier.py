"""Verification: logits of a pass become the tokens that the law asks for, and a draft is accepted as far as it agrees.

Reads sequences, changes none: what it returns is applied by commit.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verdraft.kernels.draws import BAD, UNSURE
from verdraft.kernels.noise import Contenders, IntArray, Noise, PhiloxBlocks
from verdraft.kernels.sampling import (
    AllTokensMasked,
    BadLogits,
    argmax_rows,
    bad_rows,
    choose_token,
    leading_tokens,
    row_logprobs,
)
from verdraft.scheduler.outputs import TokenLogprobs
from verdraft.scheduler.passed import Passed, Rows, banned, generates
from verdraft.scheduler.plan import Work
from verdraft.scheduler.sequence import Sequence
from verdraft.spec.acceptance import verify
from verdraft.spec.constraint import UNCONSTRAINED, ConstraintFailed
from verdraft.spec.draft import EMPTY, Draft

NO_TOKEN = (AllTokensMasked, BadLogits, ConstraintFailed)  # what Law raises where there is none
_Rest = tuple[list[int] | None, Noise, NDArray[np.bool_] | None]


class Verified(NamedTuple):
    """What a pass found out about one sequence. `tokens` are the accepted ones and one recovered or bonus token."""

    work: Work
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    margins: tuple[float, ...] = ()  # of `tokens`, where they are known

    @property
    def path(self) -> list[int]:
        """The accepted nodes of the draft: of all tokens but the last, which the pass did not compute."""
        return self.work.draft.path(self.tokens[:-1])


@dataclass(frozen=True, slots=True)
class Failed:
    """The pass over this sequence went wrong; `code` is an error code of the HTTP contract."""

    work: Work
    code: str


@dataclass(frozen=True, slots=True)
class Law:
    """The token of DESIGN section 3 at one position. `eos` are the model's end tokens, ascending; `philox` makes noise
    words."""

    eos: tuple[int, ...]
    philox: PhiloxBlocks
    contenders: Contenders | None = None

    def banned(self, seq: Sequence, ahead: int) -> list[int] | None:
        """What min_tokens forbids `ahead` tokens behind the committed ones."""
        return banned(seq, ahead, self.eos)

    def ends(self, seq: Sequence) -> frozenset[int]:
        """Tokens that end the sequence, so that nothing behind them is worth drafting."""
        params = seq.request.params
        return params.stop_token_ids if params.ignore_eos else params.stop_token_ids.union(self.eos)

    def token(self, seq: Sequence, ahead: int, best: int, row: Callable[[], Rows]) -> int:
        """The law's token behind the committed ones and `ahead` drafted ones, which were pushed to `seq` by now.
        `row` gives the logits [V] there and `best` is their argmax.

        Raises NO_TOKEN.
        """
        params, banned, constraint = seq.request.params, self.banned(seq, ahead), seq.request.constraint
        if params.plain_greedy and banned is None and constraint.allows(best):
            return best
        return choose_token(row(), params, seq.history, *self._rest(seq, ahead, banned))

    def allowed_token(self, seq: Sequence, ahead: int, found: int, row: Callable[[], Rows]) -> int:
        """The same, where `found` wins among the tokens that a grammar would allow and others, or is UNSURE: what wins
        among more wins among fewer, if it is one of them. Raises NO_TOKEN."""
        if found != UNSURE and seq.request.constraint.allows(found):
            return found
        return choose_token(row(), seq.request.params, seq.history, *self._rest(seq, ahead, self.banned(seq, ahead)))

    def leaves_raw(self, seq: Sequence, ahead: int) -> bool:
        """Whether nothing is banned, masked, penalised or biased behind the committed tokens and `ahead` more."""
        params = seq.request.params
        changed = params.uses_history or params.logit_bias or seq.request.constraint is not UNCONSTRAINED
        return not changed and self.banned(seq, ahead) is None

    def leading(
        self, seq: Sequence, ahead: int, row: Rows, count: int, names: IntArray | None = None
    ) -> tuple[IntArray, NDArray[np.float64]]:
        """For a draft: what `token` may give where the logits resemble `row`; see leading_tokens."""
        rest = self._rest(seq, ahead, self.banned(seq, ahead))
        return leading_tokens(row, seq.request.params, seq.history, *rest, count, names)

    def _rest(self, seq: Sequence, ahead: int, banned: list[int] | None) -> _Rest:
        """Banned tokens, noise and grammar mask."""
        mask = seq.request.constraint.mask()
        if banned and mask is not None and mask[banned].sum() == mask.sum():
            banned = None  # a complete grammar outranks min_tokens
        return banned, Noise(seq.seed, seq.request.choice, seq.num_output + ahead, self.philox, self.contenders), mask


@dataclass(frozen=True, slots=True)
class Verifier:
    """DESIGN section 3 for one batch."""

    law: Law

    def verify(self, plan: list[Work], passed: Passed) -> list[Verified]:
        """What the pass over this plan means. Raises NO_TOKEN."""
        return self._verify_drawn(plan, passed) if passed.drawn else self._verify_shown(plan, passed)

    def _verify_drawn(self, plan: list[Work], passed: Passed) -> list[Verified]:
        """Where the device has found tokens."""
        tokens, margins, scores = passed.tokens.tolist(), passed.margins.tolist(), passed.scores.tolist()
        found = [
            self._verify_found(work, tokens[rows], margins[rows], scores[rows])
            if work.seq.request.constraint is UNCONSTRAINED
            else self._verify_allowed(work, tokens[rows], scores[rows], partial(passed.row, rows.start))
            for work, (rows, _) in zip(plan, passed.spans, strict=True)
        ]
        told = passed.prompt_scores.tolist()
        if not told:
            return found
        return [
            one._replace(prompt_logprobs=_told_prompt(one.work, told[span.told]))
            for one, span in zip(found, passed.spans, strict=True)
        ]

    def _verify_shown(self, plan: list[Work], passed: Passed) -> list[Verified]:
        """Where the host has logits."""
        array = argmax_rows(passed.logits)
        array[bad_rows(passed.logits, array)] = BAD
        best = array.tolist()
        return [
            self._verify_found(work, best[rows])
            if work.seq.is_plain and work.seq.request.params.temperature == 0.0
            else self._verify_one(work, passed.logits[rows], best[rows])
            for work, (rows, _) in zip(plan, passed.spans, strict=True)
        ]

    def _verify_found(
        self, work: Work, tokens: list[int], margins: Seq[float] = (), scores: Seq[Seq[float]] = ()
    ) -> Verified:
        """`tokens` are the law's; row i behind node i - 1 of the draft."""
        if not tokens or work.seq.finished:
            return Verified(work)
        accepted = verify(work.draft, tokens.__getitem__)
        if accepted[-1] == BAD:  # no draft goes on with it; as in _accepted
            accepted = [_known(tokens[0])]
        params = work.seq.request.params
        known = [margins[row] for row in _rows(work, accepted)] if margins and not params.is_filtered else ()
        top = params.logprobs
        seen = [_told(scores[row], top) for row in _rows(work, accepted)] if top is not None else ()
        return Verified(work, tuple(accepted), tuple(seen), margins=tuple(known))

    def _verify_allowed(
        self, work: Work, tokens: list[int], scores: Seq[Seq[float]], row: Callable[[int], Rows]
    ) -> Verified:
        """`tokens` would be the law's without a grammar; where they are not, row(i) is asked for. Nobody knows margins:
        what comes second may not be allowed."""
        if not tokens or work.seq.finished:
            return Verified(work)
        row, top = cache(row), work.seq.request.params.logprobs
        accepted = _accepted(
            work, lambda i, ahead: self.law.allowed_token(work.seq, ahead, _known(tokens[i]), partial(row, i))
        )
        seen = [
            _told(scores[i], top) if token == tokens[i] else _score(row(i), token, top)
            for i, token in zip(_rows(work, accepted), accepted, strict=True)
            if top is not None
        ]
        return Verified(work, tuple(accepted), tuple(seen))

    def _verify_one(self, work: Work, logits: Rows, best: list[int]) -> Verified:
        if work.seq.finished:  # while the pass was under way
            return Verified(work)
        scored = _score_prompt(work, logits)
        if not work.yields or not generates(work.seq):
            return Verified(work, prompt_logprobs=scored)
        num = len(work.draft.tokens) + 1
        logits, best = logits[-num:], best[-num:]  # row i behind node i - 1 of the draft
        tokens = _accepted(work, lambda i, ahead: self.law.token(work.seq, ahead, _known(best[i]), lambda: logits[i]))
        return Verified(work, tuple(tokens), _score_output(work, logits, tokens), scored)


def _accepted(work: Work, target: Callable[[int, int], int]) -> list[int]:
    try:
        return accept(work.seq, work.draft, target)
    except NO_TOKEN:  # perhaps behind an end that commit has yet to find: the draft must not matter
        return accept(work.seq, EMPTY, target)


def _known(token: int) -> int:
    if token == BAD:
        raise BadLogits("a row of logits is not finite")
    return token


def accept(seq: Sequence, draft: Draft, target: Callable[[int, int], int]) -> list[int]:
    """The acceptance rule, with a node's path in the history of each token behind it. `target(i, ahead)` is the law's
    token after node i - 1, whose path has `ahead` tokens; in a chain the two are equal."""
    pushed = 0

    def next_target(i: int) -> int:
        nonlocal pushed
        if i:
            seq.push(draft.tokens[i - 1])
            pushed += 1
        return target(i, pushed)

    try:
        return verify(draft, next_target)
    finally:
        for _ in range(pushed):
            seq.pop()


def _score_output(work: Work, logits: Rows, tokens: list[int]) -> tuple[TokenLogprobs, ...]:
    top = work.seq.request.params.logprobs
    if top is None:
        return ()
    return tuple(_score(logits[row], token, top) for row, token in zip(_rows(work, tokens), tokens, strict=True))


def _rows(work: Work, tokens: list[int]) -> list[int]:
    """Which of the work's answers these tokens are, accepted ones and one more."""
    return [0, *(node + 1 for node in work.draft.path(tokens[:-1]))]


def _score_prompt(work: Work, logits: Rows) -> tuple[TokenLogprobs, ...]:
    """The row at position i scores prompt token i + 1."""
    seq, top = work.seq, work.seq.request.params.prompt_logprobs
    if top is None:
        return ()
    targets = seq.tokens[work.start + 1 : min(work.start + work.num_tokens + 1, seq.num_prompt)]
    return tuple(_score(row, token, top) for row, token in zip(logits, targets, strict=False))


def _told_prompt(work: Work, scores: Seq[Seq[float]]) -> tuple[TokenLogprobs, ...]:
    """The same, where the device has found them; of a prompt that is computed again, also what came behind it."""
    seq, top = work.seq, work.seq.request.params.prompt_logprobs
    if top is None or seq.finished:
        return ()
    return tuple(_told(row, top) for row in scores[: seq.num_prompt - 1 - work.start])


def _told(scores: Seq[float], top: int) -> TokenLogprobs:
    """What the device has found of a row (torch_logprobs.py)."""
    num = (len(scores) - 1) // 2
    if math.isnan(scores[0]):
        raise BadLogits("a row of logits is not finite")
    best = zip(map(int, scores[1 : num + 1]), scores[num + 1 :], strict=True)
    return TokenLogprobs(scores[0], tuple(best)[:top])


def _score(row: Rows, token: int, top: int) -> TokenLogprobs:
    logprob, best = row_logprobs(row, token, top)
    return TokenLogprobs(logprob, tuple(best))

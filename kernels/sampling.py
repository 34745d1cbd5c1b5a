"""From a row of logits to the token that the law (DESIGN section 3) asks for. Knows no request, no draft."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from verdraft.kernels.noise import GUMBEL_MAX, IntArray, Noise, least_word, to_gumbel
from verdraft.kernels.ranking import head, largest, nucleus

Row = NDArray[np.float32]
Scores = NDArray[np.float64]

LOGPROB_FLOOR = -9999.0
HUGE = 1e300  # keeps extreme penalties finite, so that they never look like a mask
LIKELIEST = 128  # tokens are looked at before all others, of which about V / 128 at most can then still win
_MOST = 1e30  # of a logit that the quick way can deal with
_SLACK = 1e-9  # far above the rounding of a score, far below the gaps that matter


class BadLogits(ValueError):
    """The row holds NaN or infinity where a number is needed: the computation that made it went wrong."""


class AllTokensMasked(ValueError):
    """Masks and banned tokens leave nothing to choose from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitParams:
    """What shapes the distribution at one position, applied in the order of the fields after `logit_bias`."""

    repetition_penalty: float = 1.0  # counts prompt and output
    presence_penalty: float = 0.0  # counts output
    frequency_penalty: float = 0.0  # counts output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    temperature: float = 1.0  # 0: argmax, and top_k, top_p, min_p have no effect
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def uses_history(self) -> bool:
        """Whether earlier tokens change the distribution."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_filtered(self) -> bool:
        """Whether a temperature leaves some tokens out."""
        return self.temperature > 0.0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def plain_greedy(self) -> bool:
        """Whether the law is the argmax of the raw row (as long as nothing is banned or masked)."""
        return self.temperature == 0.0 and not self.uses_history and not self.logit_bias


class TokenHistory:
    """The tokens that penalties count: the prompt's distinct ids and the output's counts.

    push() and pop() work as a stack, so that the earlier draft tokens of a window can be in the history of a later
    one and leave it again. Both are O(1), and do nothing when no penalty is active.
    """

    def __init__(self, params: LogitParams, prompt: Sequence[int] = ()) -> None:
        self._active = params.uses_history
        ids = list(dict.fromkeys(prompt)) if params.repetition_penalty != 1.0 else []
        self._num_prompt = self._len = len(ids)
        self._slots = {token: slot for slot, token in enumerate(ids)}
        self._ids = np.array([*ids, *[0] * 16], np.int64)
        self._counts = np.zeros(self._ids.size, np.int64)
        self._pushed: list[int] = []

    def count(self, token: int) -> int:
        """How often the output holds `token`; 0 where nothing is counted."""
        slot = self._slots.get(token)
        return 0 if slot is None else int(self._counts[slot])

    def push(self, token: int) -> None:
        """One more output token."""
        if not self._active:
            return
        slot = self._slots.setdefault(token, self._len)
        if slot == self._len:
            self._add_slot(token)
        self._counts[slot] += 1
        self._pushed.append(token)

    def pop(self) -> None:
        """Forget the token that was pushed last."""
        if not self._active:
            return
        token = self._pushed.pop()
        slot = self._slots[token]
        self._counts[slot] -= 1
        if self._counts[slot] == 0 and slot >= self._num_prompt:
            # A stack: whatever came after this token's first push has gone before it.
            assert slot == self._len - 1
            del self._slots[token]
            self._len -= 1

    def _add_slot(self, token: int) -> None:
        if self._len == self._ids.size:
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[self._len] = token
        self._counts[self._len] = 0
        self._len += 1

    @property
    def ids(self) -> IntArray:
        """Distinct ids of prompt (when the repetition penalty needs it) and output."""
        return self._ids[: self._len]

    @property
    def counts(self) -> IntArray:
        """How often the output holds each of `ids`."""
        return self._counts[: self._len]


def choose_token(
    row: Row,
    params: LogitParams,
    history: TokenHistory,
    banned: Sequence[int] | None,
    noise: Noise,
    mask: NDArray[np.bool_] | None = None,
) -> int:
    """The law's token at the OUTPUT position of `noise`: a pure function of its arguments. `row` [V] stays as it is.

    `banned` ids are impossible (min_tokens), and so is every token where `mask` [V] is False (grammar).
    Raises BadLogits for NaN or +infinity, AllTokensMasked when nothing is left.
    """
    raw = not (params.uses_history or params.logit_bias or banned) and mask is None
    scores = None if raw else processed(row, params, history, banned, mask)
    if params.temperature > 0.0 and (token := _quick_token(row, scores, params, noise)) is not None:
        return token
    if scores is None:
        scores = row.astype(np.float64)
    best = int(scores.argmax())  # the lowest id of equals
    highest = float(scores[best])
    _require_finite(row, highest)
    if params.temperature == 0.0:
        return best
    scores -= highest
    if params.temperature != 1.0:
        with np.errstate(over="ignore"):  # a tiny temperature may push all but the best to -infinity, which is right
            scores /= params.temperature
    return _noisy_argmax(*kept_tokens(scores, params), noise)


def _quick_token(row: Row, exact: Scores | None, params: LogitParams, noise: Noise) -> int | None:
    """choose_token at a temperature, of the row or what it was processed to; None: not the quick way."""
    if noise.contenders is None:
        return None
    highest = float((row if exact is None else exact).max())
    if not -_MOST < highest < _MOST:  # where something is wrong, too
        return None
    if exact is not None:
        with np.errstate(over="ignore"):
            row = exact.astype(np.float32)
    limits = (params.top_k, params.top_p, math.log(params.min_p) if params.min_p > 0.0 else -math.inf)
    draw = (noise.seed, noise.choice, noise.position)
    tokens = noise.contenders(draw, row, exact, highest, params.temperature, limits)
    if tokens is None or tokens.size == 1:
        return None if tokens is None else int(tokens[0])
    with np.errstate(over="ignore"):
        scores = ((row if exact is None else exact)[tokens].astype(np.float64) - highest) / params.temperature
    return int(tokens[np.argmax(scores + noise.gumbel(tokens))])


def leading_tokens(
    row: Row,
    params: LogitParams,
    history: TokenHistory,
    banned: Sequence[int] | None,
    noise: Noise,
    mask: NDArray[np.bool_] | None,
    count: int,
    names: IntArray | None = None,
) -> tuple[IntArray, Scores]:
    """For a draft: at most `count` tokens that choose_token may give where the true row resembles `row`, the likeliest
    first, and the share of each. Only the LIKELIEST likeliest tokens of `row` can be among them.

    `names` are the tokens that `row` speaks of if these are not all; then nothing may be banned, masked or penalised.
    Raises BadLogits, AllTokensMasked.
    """
    scores = processed(row, params, history, banned, mask)
    highest = float(scores.max())
    _require_finite(row, highest)
    scores -= highest
    if params.temperature not in (0.0, 1.0):
        with np.errstate(over="ignore"):
            scores /= params.temperature
    greedy = params.temperature == 0.0
    tokens, scores = kept_tokens(scores, LogitParams(temperature=0.0) if greedy else params)
    first = largest(scores, min(LIKELIEST, scores.size))
    tokens, scores = tokens[first], scores[first]
    if names is not None:
        tokens = names[tokens]
    if not greedy:
        scores += noise.gumbel(tokens)
    weights = np.exp(scores - scores.max())
    order = np.argsort(-weights, kind="stable")[:count]
    return tokens[order], weights[order] / weights.sum()


def processed(
    row: Row,
    params: LogitParams,
    history: TokenHistory,
    banned: Sequence[int] | None = None,
    mask: NDArray[np.bool_] | None = None,
) -> Scores:
    """A copy of the row [V] after repetition, presence and frequency penalties, bias and masks (-infinity)."""
    logits = row.astype(np.float64)
    if params.uses_history:
        _penalise(logits, params, history)
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias, np.int64)
        logits[ids] += np.fromiter(params.logit_bias.values(), np.float64)
    if banned:
        logits[np.asarray(banned, np.int64)] = -np.inf
    if mask is not None:
        logits[~mask] = -np.inf
    return logits


def _penalise(logits: Scores, params: LogitParams, history: TokenHistory) -> None:
    ids, counts = history.ids, history.counts
    values = logits[ids]
    with np.errstate(over="ignore"):
        scaled = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    np.clip(scaled, -HUGE, HUGE, out=values, where=np.isfinite(values))
    logits[ids] = values - params.presence_penalty * (counts > 0) - params.frequency_penalty * counts


def _require_finite(row: Row, best: float) -> None:
    if math.isfinite(best):
        return
    if best == -math.inf and math.isfinite(row.max()):
        raise AllTokensMasked("every token is masked or banned at this position")
    raise BadLogits("the logits hold NaN or infinity")


def kept_tokens(scores: Scores, params: LogitParams) -> tuple[IntArray, Scores]:
    """Ids, ascending, of the possible tokens that survive top_k, then top_p, then min_p; and their scores.

    `scores` [V] are (logit - largest) / temperature, -infinity for the impossible ones.
    All three are deterministic: of equal scores the lower id counts as the more likely one.
    """
    tokens = np.arange(scores.size)
    if scores.min() == -np.inf:
        tokens = np.flatnonzero(scores > -np.inf)
        scores = scores[tokens]
    if 0 < params.top_k < scores.size:
        kept = largest(scores, params.top_k)
        tokens, scores = tokens[kept], scores[kept]
    if params.top_p < 1.0:
        kept = nucleus(np.exp(scores), params.top_p)
        tokens, scores = tokens[kept], scores[kept]
    if params.min_p > 0.0:
        # top_p may have kept another of those whose exp rounds to 1 than the largest.
        kept = np.flatnonzero(scores >= min(math.log(params.min_p), float(scores.max())))
        tokens, scores = tokens[kept], scores[kept]
    return tokens, scores


def _noisy_argmax(tokens: IntArray, scores: Scores, noise: Noise) -> int:
    """The token (of `tokens`, ascending) whose score + noise is largest, of equals the lowest id.

    The likeliest tokens go first. Any other one wins only with a noise that bridges the gap between the best of these
    and their lowest score; which tokens have that is told by their words alone, and few do.
    """
    first = head(scores, LIKELIEST)
    words = noise.row_words(scores.size) if tokens[-1] < tokens.size else noise.words(tokens)
    noisy = scores[first] + to_gumbel(words[first])
    leader = first[noisy.argmax()]
    gap = float(noisy.max() - scores[first].min()) - _SLACK
    if first.size == tokens.size or gap > GUMBEL_MAX:
        return int(tokens[leader])
    able = np.append(np.flatnonzero(words >= least_word(gap)), leader)
    able.sort()
    return int(tokens[able[np.argmax(scores[able] + to_gumbel(words[able]))]])


def argmax_rows(logits: NDArray[np.floating]) -> IntArray:
    """The plain greedy law for a whole batch [R, V]: of equal logits the lowest id. See `bad_rows`."""
    best: IntArray = logits.argmax(axis=1)
    return best


def bad_rows(logits: NDArray[np.floating], best: IntArray) -> NDArray[np.bool_]:
    """Which rows [R] of [R, V] hold NaN or +infinity, or nothing finite. `best` is their argmax_rows, which finds
    a NaN as surely as the largest value, so one look at it is enough."""
    bad: NDArray[np.bool_] = ~np.isfinite(logits[np.arange(len(best)), best])
    return bad


def row_logprobs(row: Row, chosen: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    """Raw log-probabilities (natural log, in [-9999, 0]): of `chosen`, and of the `top` most likely, descending.

    Exactly min(top, V) pairs (id, logprob); of equals the lower id first. Raises BadLogits.
    """
    highest = float(row.max())
    if not math.isfinite(highest):
        raise BadLogits("the logits hold NaN or infinity")
    weights = row.astype(np.float64)
    weights -= highest
    total = highest + math.log(float(np.exp(weights, out=weights).sum()))
    ids = largest(row, min(top, row.size)) if top else np.empty(0, np.int64)
    ids = ids[np.argsort(-row[ids], kind="stable")]
    return _logprob(row, chosen, total), [(token, _logprob(row, token, total)) for token in ids.tolist()]


def _logprob(row: Row, token: int, total: float) -> float:
    return min(0.0, max(LOGPROB_FLOOR, float(row[token]) - total))

"""The prediction source: drafts from the text that the request itself expects, resynchronised where the output departs
from it. Knows two token sequences; learns what was accepted from the tokens that are committed."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from verdraft.spec.draft import ASK, EMPTY, Draft, common_length

_FIRST_LEN = 16  # tokens of the first draft; doubles with every full acceptance
_MIN_LEN = 4
_MAX_LEN = 256
_GUESS_LEN = 4  # after a single differing token the prediction may simply go on
_TRUSTED = 8  # agreeing tokens before which such a guess is not made
_PRIOR = 8  # a client predicts what it expects: worth as much as so many agreeing tokens
_MAX_MATCH = 8  # a match is not measured beyond this when resynchronising
_AHEAD_BONUS = 4  # being ahead of the cursor is worth this many tokens of match
_CLOSE = 32  # so far ahead a match of two tokens will do
_NEAREST = 16  # places looked at on either side of the cursor
_PROMISED = 4  # tokens of a draft that no load trims: most of a right prediction is accepted (HTTP contract, section 9)
_MAX_PAUSE = 64  # output tokens without a try after repeated failures

# HTTP contract, section 9: an unrelated prediction costs at most this many rejected tokens.
_WASTE_OFFSET, _WASTE_PER_TOKEN = 64, 8


class PredictionDrafter:
    """One sequence's prediction source. The cursor is where the prediction goes on, or, while lost, was to go on."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = tuple(prediction)
        self._places: dict[tuple[int, ...], list[int]] = {}  # pair of tokens -> where the prediction goes on behind it
        self._output: list[int] = []
        self._cursor = 0
        self._lost = False
        self._agreed = _TRUSTED  # tokens that supported the cursor; the client's word counts for some
        self._draft_len = _FIRST_LEN
        self._proposed: tuple[int, ...] = ()
        self._failures = 0  # drafts in a row of which nothing was accepted
        self._resume_at = 0  # output length at which drafting goes on
        self._num_rejected = 0
        self._state = "new"

    @property
    def num_rejected(self) -> int:
        """Drafted tokens known to have been rejected; at most 64 + 8 * output tokens."""
        return self._num_rejected

    def start(self, prompt: Sequence[int]) -> None:
        self._become("new", "running")
        places: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i in range(1, len(self._prediction) - 1):
            places[self._prediction[i - 1], self._prediction[i]].append(i + 1)
        self._places = dict(places)

    def stop(self) -> None:
        self._become("running", "stopped")
        self._places, self._output, self._prediction = {}, [], ()

    def _become(self, old: str, new: str) -> None:
        if self._state != old:
            raise RuntimeError(f"the drafter is {self._state}, not {old}")
        self._state = new

    def clue(self) -> int:
        return ASK

    def propose(self, limit: int) -> Draft:
        self._become("running", "running")
        length = min(limit, self._draft_len, self._budget())
        self._proposed = ()
        if self._lost or length <= 0 or len(self._output) < self._resume_at:
            return EMPTY
        self._proposed = self._prediction[self._cursor : self._cursor + length]
        if not self._proposed:
            return EMPTY
        hope = 1.0 - 1.0 / (self._agreed + _PRIOR)
        probs = tuple(hope ** (i + 1) for i in range(len(self._proposed)))
        least = 0 if self._failures else min(_PROMISED, length)
        return Draft(self._proposed, "prediction", probs, self._agreed, least=least)

    def _budget(self) -> int:
        """Tokens that may still be wasted: the next step commits at least one token whatever is drafted."""
        return _WASTE_OFFSET + _WASTE_PER_TOKEN * (len(self._output) + 1) - self._num_rejected

    def extend(self, tokens: Sequence[int]) -> None:
        self._become("running", "running")
        proposed, self._proposed = self._proposed, ()
        accepted = common_length(proposed, tokens)
        for token in tokens:
            self._output.append(token)
            self._follow(token)
        if accepted < len(tokens) and proposed:  # else the draft was cut before it could be judged
            self._learn(accepted, len(proposed))
        if self._lost:
            self._resynchronise()

    def _follow(self, token: int) -> None:
        """Move the cursor over one committed token."""
        if self._lost or self._cursor >= len(self._prediction):
            self._lost = True
        elif self._prediction[self._cursor] == token:
            self._cursor, self._agreed = self._cursor + 1, self._agreed + 1
        elif self._agreed >= _TRUSTED:
            self._cursor, self._agreed = self._cursor + 1, 0  # perhaps one token stands for another
            self._draft_len = min(self._draft_len, _GUESS_LEN)
        else:
            self._lost = True

    def _learn(self, accepted: int, proposed: int) -> None:
        self._num_rejected += proposed - accepted
        if accepted == proposed:
            self._draft_len = min(2 * self._draft_len, _MAX_LEN)
        elif accepted < proposed // 2:
            self._draft_len = max(_MIN_LEN, min(self._draft_len, proposed // 2))
        self._failures = 0 if accepted > 0 else self._failures + 1
        if self._failures > 2:
            self._resume_at = len(self._output) + min(_MAX_PAUSE, 2**self._failures)

    def _resynchronise(self) -> None:
        """Look for the end of the output in the prediction: the longest match, ahead of the cursor if possible."""
        places = self._places.get(tuple(self._output[-2:]), [])
        middle = bisect_left(places, self._cursor)
        near = places[max(0, middle - _NEAREST) : middle + _NEAREST]
        if not near:
            return
        place = max(
            near, key=lambda p: (self._matching(p) + _AHEAD_BONUS * (p >= self._cursor), -abs(p - self._cursor))
        )
        match_len = self._matching(place)
        if match_len > 2 or 0 <= place - self._cursor <= _CLOSE:
            self._cursor, self._lost, self._agreed = place, False, match_len

    def _matching(self, place: int) -> int:
        """How many tokens before `place` equal the end of the output, at most _MAX_MATCH."""
        most = min(place, len(self._output), _MAX_MATCH)
        ended = (n for n in range(most) if self._prediction[place - 1 - n] != self._output[-1 - n])
        return next(ended, most)

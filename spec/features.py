"""phi: what is known about a suffix draft before it is verified (DESIGN section 6; HVD, PAPERS 1.2).

Knows token ids, and of their text nothing but a byte of flags per id, which the caller made from its tokenizer. So a
predictor that reads phi fits any vocabulary and any model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log1p
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verdraft.spec.draft import Draft

Floats = NDArray[np.float32]
TokenClasses = NDArray[np.uint8]  # [vocab]: flags of every token

WHITESPACE, PUNCTUATION, BRACKET, DELIMITER, DIGIT = 1, 2, 4, 8, 16
CLASSES = ("whitespace", "punctuation", "bracket", "delimiter", "digit")
NO_CLASSES: TokenClasses = np.zeros(1, np.uint8)  # without a tokenizer: no token has a flag
_MEMBERS = {
    WHITESPACE: "\n\r\t\v\f",  # a single space begins most words and says nothing
    PUNCTUATION: ".,;:!?'\"`-",
    BRACKET: "()[]{}<>",
    DELIMITER: ',;:|=/\\"\n',
    DIGIT: "0123456789",
}

RECENT = 4  # accepted lengths that count one by one
_MEMORY = 0.9  # weight of the earlier cycles when the next one comes
_LEVELS = (1, 2, 4, 8, 16, 32)  # path probabilities at these lengths
FEATURES: tuple[str, ...] = (
    *("score", "match_len", "draft_len", "prompt_len", "generated_len", "relative_position"),
    *(f"prob_{level}" for level in _LEVELS),
    *("selection_rate", "num_judged", "mean_accepted", "kept_whole"),
    *(f"accepted_{i + 1}_ago" for i in range(RECENT)),
    *(f"{name}_share" for name in CLASSES),
    *(f"first_{name}" for name in CLASSES),
)
HISTORY = slice(FEATURES.index("selection_rate"), FEATURES.index(f"accepted_{RECENT}_ago") + 1)
_SHIFTS = [16 * i for i in range(len(CLASSES))]
_FIELD = 0xFFFF
_COUNTS = [
    sum((flags >> i & 1) << 16 * i for i in range(len(CLASSES))) for flags in range(256)
]  # a field for each flag


@dataclass(slots=True)
class RecentHistory:
    """What became of one sequence's latest suffix drafts, verified or not; rolling means of about ten cycles."""

    selection_rate: float = 0.0  # of the cycles, those in which the suffix draft was verified
    mean_accepted: float = 0.0
    kept_whole: float = 0.0  # of the drafts, those without a wrong token
    num_judged: int = 0
    accepted: list[int] = field(default_factory=lambda: [0] * RECENT)  # of the last drafts, the newest first

    def cycle(self, selected: bool) -> None:
        """One more decoding cycle, with this choice."""
        self.selection_rate = _MEMORY * self.selection_rate + (1 - _MEMORY) * selected

    def judge(self, drafted: int, accepted: int) -> None:
        """It has turned out how many of a draft's tokens are right."""
        self.mean_accepted = _MEMORY * self.mean_accepted + (1 - _MEMORY) * accepted
        self.kept_whole = _MEMORY * self.kept_whole + (1 - _MEMORY) * (accepted == drafted)
        self.num_judged += 1
        self.accepted = [accepted, *self.accepted[:-1]]


class DecodeState(NamedTuple):
    """Where a draft would be verified."""

    prompt_len: int
    generated_len: int
    history: RecentHistory


def classify(texts: Sequence[bytes | None]) -> TokenClasses:
    """[vocab] flags from the bytes of every token; special tokens (None) have none."""
    flags = [(flag, frozenset(members.encode())) for flag, members in _MEMBERS.items()]
    return np.array([sum(flag for flag, members in flags if members & set(text or b"")) for text in texts], np.uint8)


def describe(
    drafts: Sequence[Draft], states: Sequence[DecodeState], classes: TokenClasses = NO_CLASSES
) -> Floats:  # [N, len(FEATURES)]
    """phi of each draft, none of them empty. Lengths enter as log(1 + length)."""
    rows = [_numbers(d, s) + _classes_of(d.tokens, classes.data) for d, s in zip(drafts, states, strict=True)]
    return np.array(rows, np.float32).reshape(-1, len(FEATURES))


def _numbers(draft: Draft, state: DecodeState) -> list[float]:
    probs, length = draft.probs, len(draft.tokens)
    levels = [probs[level - 1] if level <= length else 0.0 for level in _LEVELS]
    generated, prompt = state.generated_len, state.prompt_len
    place = [
        log1p(draft.match_len),
        log1p(length),
        log1p(prompt),
        log1p(generated),
        generated / (prompt + generated + 1),
    ]
    return [sum(probs), *place, *levels, *_past(state.history)]


def _past(history: RecentHistory) -> list[float]:
    judged, accepted = log1p(history.num_judged), log1p(history.mean_accepted)
    return [history.selection_rate, judged, accepted, history.kept_whole, *map(log1p, history.accepted)]


def history_features(history: RecentHistory) -> Floats:
    """The part HISTORY of a row of phi."""
    return np.array(_past(history), np.float32)


def _classes_of(tokens: Sequence[int], flags: memoryview) -> list[float]:
    """The share of these tokens with each flag, and the flags of the first: a few plain sums, because a step between
    two passes finds nothing of numpy in the caches."""
    known = len(flags)
    counts = [_COUNTS[flags[token]] if token < known else 0 for token in tokens]
    total, first = sum(counts), counts[0]
    return [(total >> shift & _FIELD) / len(counts) for shift in _SHIFTS] + [first >> shift & 1 for shift in _SHIFTS]

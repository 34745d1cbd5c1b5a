"""phi: what is known about a suffix draft before it is verified (DESIGN section 6; HVD, PAPERS 1.2).

Knows token ids, and of their text nothing but a byte of flags per id, which the caller made from its tokenizer. So a
predictor that reads phi fits any vocabulary and any model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

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
_COUNTS = [FEATURES.index(name) for name in ("match_len", "draft_len", "prompt_len", "generated_len", "num_judged")]
_COUNTS += [FEATURES.index(name) for name in ("mean_accepted", *(f"accepted_{i + 1}_ago" for i in range(RECENT)))]


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


@dataclass(frozen=True, slots=True)
class DecodeState:
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
    if not drafts:
        return np.zeros((0, len(FEATURES)), np.float32)
    known = np.array([_numbers(draft, state) for draft, state in zip(drafts, states, strict=True)], np.float32)
    return np.concatenate((_scaled(known), _class_features(drafts, classes)), axis=1)


def _numbers(draft: Draft, state: DecodeState) -> list[float]:
    probs, length, history = draft.probs, len(draft.tokens), state.history
    levels = [probs[level - 1] if level <= length else 0.0 for level in _LEVELS]
    generated, prompt = state.generated_len, state.prompt_len
    place = [draft.match_len, length, prompt, generated, generated / (prompt + generated + 1)]
    return [sum(probs), *place, *levels, *_past(history)]


def _past(history: RecentHistory) -> list[float]:
    rates = [history.selection_rate, history.num_judged, history.mean_accepted, history.kept_whole]
    return [*rates, *history.accepted]


def history_features(history: RecentHistory) -> Floats:
    """The part HISTORY of a row of phi."""
    row = np.zeros((1, len(FEATURES)), np.float32)
    row[0, HISTORY] = _past(history)
    return _scaled(row)[0, HISTORY]


def _scaled(rows: Floats) -> Floats:
    rows[:, _COUNTS] = np.log1p(rows[:, _COUNTS])
    return rows


def _class_features(drafts: Sequence[Draft], classes: TokenClasses) -> Floats:  # [N, 2 * len(CLASSES)]
    """Of each draft, the share of tokens with each flag, and the flags of its first token."""
    lengths = np.array([len(draft.tokens) for draft in drafts])
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    tokens = np.array([token for draft in drafts for token in draft.tokens])
    flags = classes[np.where(tokens < len(classes), tokens, 0)] if len(classes) > 1 else np.zeros(len(tokens), np.uint8)
    bits = np.unpackbits(flags[:, None], axis=1, count=len(CLASSES), bitorder="little").astype(np.float32)
    shares = np.add.reduceat(bits, starts) / lengths[:, None]
    found: Floats = np.concatenate((shares, bits[starts]), axis=1, dtype=np.float32)
    return found

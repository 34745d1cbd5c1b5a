"""Recorded answers become labelled states without running any model (HVD, PAPERS 1.3).

At every position the suffix source is as a server would have it then (prompt, own output so far, earlier answers of the
same file), proposes, and the recorded continuation says how much of the draft is right. Knows token ids only.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from verdraft.spec.draft import Draft, common_length
from verdraft.spec.features import FEATURES, DecodeState, Floats, TokenClasses, describe
from verdraft.spec.hindsight import Hindsight
from verdraft.spec.suffix import SharedSuffixStore, SuffixDrafter

Ints = NDArray[np.int32]

# A server's router decides which drafts are verified and how far a cycle gets, and phi shows it. No one router is the
# right one to imitate, so every answer is replayed under one of many: the least score that it takes, and how many
# tokens its other source brings at the most.
_THRESHOLDS, _OTHERS = (0.0, 0.5, 1.0, 2.0, 4.0), (0, 1, 3)


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One answer of a recorded conversation; those of one `conversation` are held out together."""

    workload: str
    conversation: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    ended: bool = True  # False: cut at a limit, so what would have followed is unknown
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class States:
    """Every position with a suffix draft, in the order of the answers and of their tokens."""

    features: Floats  # [N, F]
    drafted: Ints  # [N]
    accepted: Ints  # [N]
    answer: Ints  # [N] number of the answer
    position: Ints  # [N] output tokens before the draft
    answers: tuple[RecordedAnswer, ...]  # without their tokens
    lengths: Ints  # [len(answers)] output tokens

    @property
    def held_out(self) -> NDArray[np.bool_]:  # [N]
        return np.array([answer.held_out for answer in self.answers], bool)[self.answer]

    @property
    def workload(self) -> NDArray[np.str_]:  # [N]
        return np.array([answer.workload for answer in self.answers])[self.answer]


@dataclass(slots=True)
class _Found:
    """What a replay has found so far."""

    features: list[Floats] = field(default_factory=list)
    numbers: list[tuple[int, int, int, int]] = field(default_factory=list)  # drafted, accepted, answer, position
    answers: list[RecordedAnswer] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def states(self) -> States:
        features = np.stack(self.features) if self.features else np.zeros((0, len(FEATURES)), np.float32)
        drafted, accepted, answer, position = np.array(self.numbers, np.int32).reshape(-1, 4).T
        return States(features, drafted, accepted, answer, position, tuple(self.answers), np.array(self.lengths))


def replay(
    files: Iterable[Iterable[RecordedAnswer]],
    classes: TokenClasses,
    draft_len: int = 64,
    store_tokens: int = 1_000_000,
    seed: int = 42,
) -> States:
    """States of all answers; each of `files` has a shared store of its own, which its earlier answers fill.

    `draft_len`: longest draft (HVD: 64). Deterministic.
    """
    found = _Found()
    for answers in files:
        store = SharedSuffixStore(store_tokens)
        for answer in answers:
            _Replay(answer, SuffixDrafter(store), classes, draft_len).run(found, seed)
    return found.states()


class _Replay:
    """One answer, token by token. The first one is the prefill's, and nobody drafts it."""

    def __init__(self, answer: RecordedAnswer, drafter: SuffixDrafter, classes: TokenClasses, draft_len: int) -> None:
        self.answer, self.drafter, self.classes, self.draft_len = answer, drafter, classes, draft_len
        self.hindsight = Hindsight()

    def run(self, found: _Found, seed: int) -> None:
        output, number = self.answer.output, len(found.answers)
        router = _router(random.Random(f"{seed} {number}"))
        self.drafter.start(self.answer.prompt)
        cycle = 1
        for position, token in enumerate(output):
            if position > 0:
                draft = self.drafter.propose(self.draft_len)
                accepted = common_length(draft.tokens, output[position : position + len(draft.tokens)])
                row = self._describe(draft, position)
                if draft.tokens and self._decided(draft, position, accepted):
                    found.features.append(row)
                    found.numbers.append((len(draft.tokens), accepted, number, position))
                if position == cycle:
                    cycle += 1 + self._cycle(draft, row, accepted, next(router))
            self.hindsight.commit((token,))
            self.drafter.extend((token,))
        self.drafter.stop()
        found.lengths.append(len(output))
        found.answers.append(RecordedAnswer(self.answer.workload, self.answer.conversation, (), (), *self._flags()))

    def _flags(self) -> tuple[bool, bool]:
        return self.answer.ended, self.answer.held_out

    def _describe(self, draft: Draft, position: int) -> Floats:
        if not draft.tokens:
            return np.zeros(len(FEATURES), np.float32)
        state = DecodeState(len(self.answer.prompt), position, self.hindsight.history)
        row: Floats = describe([draft], [state], self.classes)[0]
        return row

    def _decided(self, draft: Draft, position: int, accepted: int) -> bool:
        """Whether the record says all about the draft: a text that was cut leaves open what agrees up to its end."""
        return self.answer.ended or accepted == len(draft.tokens) or position + accepted < len(self.answer.output)

    def _cycle(self, draft: Draft, row: Floats, accepted: int, choice: tuple[float, int]) -> int:
        """A cycle of the imitated router begins here; how many drafted tokens it keeps."""
        threshold, other = choice
        selected = bool(draft.tokens) and draft.score >= threshold
        self.hindsight.history.cycle(selected)
        if draft.tokens:
            self.hindsight.watch(draft.tokens, row, 0.0)
        return accepted if selected else other


def _router(rng: random.Random) -> Iterator[tuple[float, int]]:
    """For every cycle the score from which the suffix draft is verified, and what the other source brings."""
    threshold, most = rng.choice(_THRESHOLDS), rng.choice(_OTHERS)
    while True:
        yield threshold, rng.randint(0, most)


def joined(parts: Sequence[States]) -> States:
    """Several replays as one."""
    offsets = np.cumsum([0, *(len(part.answers) for part in parts)])
    answer = [part.answer + offset for part, offset in zip(parts, offsets, strict=False)]
    columns = ("features", "drafted", "accepted", "position", "lengths")
    found = {name: np.concatenate([getattr(part, name) for part in parts]) for name in columns}
    answers = tuple(answer for part in parts for answer in part.answers)
    return States(**found, answer=np.concatenate(answer).astype(np.int32), answers=answers)

"""Which draft sources a sequence gets, and in which order they are asked. Knows modes and tokens, no Request."""

from collections.abc import Iterator, Sequence
from typing import Literal

from verdraft.spec.constraint import UNCONSTRAINED, Constraint
from verdraft.spec.draft import EMPTY, Draft, Drafter, NoDrafter
from verdraft.spec.grammar import GrammarDrafter
from verdraft.spec.prediction import PredictionDrafter
from verdraft.spec.suffix import SharedSuffixStore, SuffixDrafter


class _Sources:
    """Several sources; all of them see every committed token. Drafts end where `constraint` forbids the next token."""

    def __init__(self, drafters: Sequence[Drafter], constraint: Constraint = UNCONSTRAINED) -> None:
        self._drafters = tuple(drafters)
        self._constraint = constraint

    def start(self, prompt: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.start(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.extend(tokens)

    def stop(self) -> None:
        for drafter in self._drafters:
            drafter.stop()

    def clue(self) -> int:
        return max(drafter.clue() for drafter in self._drafters)

    def _proposals(self, limit: int) -> Iterator[Draft]:
        for drafter in self._drafters:
            draft = drafter.propose(limit)
            yield draft.trim(self._constraint.num_allowed(draft.tokens))


class ChainOfSources(_Sources):
    """Several sources as one: the first that proposes anything wins."""

    def propose(self, limit: int) -> Draft:
        return next((draft for draft in self._proposals(limit) if draft.tokens), EMPTY)


class MostPromising(_Sources):
    """Several sources as one: the draft with the most expected tokens wins, of equals the first."""

    def propose(self, limit: int) -> Draft:
        return max(self._proposals(limit), key=lambda draft: draft.score)


def make_drafter(
    mode: Literal["off", "suffix", "early_exit", "hispec", "eagle", "hybrid"],
    prediction: Sequence[int] = (),
    store: SharedSuffixStore | None = None,
    local_tokens: int = 32768,
    constraint: Constraint = UNCONSTRAINED,
) -> Drafter:
    """The free sources of one sequence. `store` is None for a sequence that must not share; "off" drafts
    nothing but what it is given as a prediction, and where one model is to draft, it does so without the suffix source.

    `local_tokens`: prompt and output tokens that the sequence's own index remembers, best the model's context length.
    `constraint`: what the sequence must keep to; it drafts too what it forces.
    """
    rest: list[Drafter] = [SuffixDrafter(store, local_tokens)] if mode in ("suffix", "hybrid") else []
    if constraint is not UNCONSTRAINED and mode != "off":
        rest = [MostPromising([*rest, GrammarDrafter(constraint)], constraint)]
    if prediction:
        rest = [ChainOfSources([PredictionDrafter(prediction), *rest], constraint)]
    return rest[0] if rest else NoDrafter()

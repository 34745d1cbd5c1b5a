"""Which draft sources a sequence gets, and in which order they are asked. Knows modes and tokens, no Request."""

from collections.abc import Sequence
from typing import Literal

from verdraft.spec.draft import EMPTY, Draft, Drafter, NoDrafter
from verdraft.spec.prediction import PredictionDrafter
from verdraft.spec.suffix import SharedSuffixStore, SuffixDrafter


class ChainOfSources:
    """Several sources as one: the first that proposes anything wins. All of them see every committed token."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)

    def start(self, prompt: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.start(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.extend(tokens)

    def propose(self, limit: int) -> Draft:
        return next((draft for drafter in self._drafters if (draft := drafter.propose(limit)).tokens), EMPTY)

    def stop(self) -> None:
        for drafter in self._drafters:
            drafter.stop()


def make_drafter(
    mode: Literal["off", "suffix"],
    prediction: Sequence[int] = (),
    store: SharedSuffixStore | None = None,
    local_tokens: int = 32768,
) -> Drafter:
    """The source of one sequence. `store` is None for a sequence that must not share; "off" drafts nothing at all.

    `local_tokens`: prompt and output tokens that the sequence's own index remembers, best the model's context length.
    """
    if mode == "off":
        return NoDrafter()
    suffix = SuffixDrafter(store, local_tokens)
    return ChainOfSources([PredictionDrafter(prediction), suffix]) if prediction else suffix

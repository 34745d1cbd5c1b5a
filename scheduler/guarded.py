"""Draft sources that may fail: drafts are free to be wrong, so an error costs speed and no request."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from verdraft.spec.draft import EMPTY, Draft, Drafter, NoDrafter

logger = logging.getLogger("verdraft.engine")

Result = TypeVar("Result")


class GuardedDrafter:
    """One sequence's draft source; after its first error there is none any more. `request_id` is for the log."""

    def __init__(self, drafter: Drafter, request_id: str) -> None:
        self._drafter = drafter
        self._request_id = request_id

    @property
    def is_silent(self) -> bool:
        """Whether it will never propose anything."""
        return isinstance(self._drafter, NoDrafter)

    def start(self, prompt: Sequence[int]) -> None:
        self._guarded(lambda: self._drafter.start(prompt), None)

    def extend(self, tokens: Sequence[int]) -> None:
        self._guarded(lambda: self._drafter.extend(tokens), None)

    def clue(self) -> int:
        return self._guarded(lambda: self._drafter.clue(), 0)

    def propose(self, limit: int) -> Draft:
        return self._guarded(lambda: self._drafter.propose(limit), EMPTY)

    def stop(self) -> None:
        self._guarded(lambda: self._drafter.stop(), None)

    def _guarded(self, call: Callable[[], Result], otherwise: Result) -> Result:
        try:
            return call()
        except Exception:
            logger.exception("request %s goes on without drafts", self._request_id)
            self._drafter = NoDrafter()
            return otherwise

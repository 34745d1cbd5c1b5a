"""Draft sources that may fail: drafts are free to be wrong, so an error costs speed and no request."""

import logging
from collections.abc import Sequence

from verdraft.spec.draft import EMPTY, Draft, Drafter, NoDrafter

logger = logging.getLogger("verdraft.engine")


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
        try:
            self._drafter.start(prompt)
        except Exception:
            self._give_up()

    def extend(self, tokens: Sequence[int]) -> None:
        try:
            self._drafter.extend(tokens)
        except Exception:
            self._give_up()

    def clue(self) -> int:
        try:
            return self._drafter.clue()
        except Exception:
            self._give_up()
            return 0

    def propose(self, limit: int) -> Draft:
        try:
            return self._drafter.propose(limit)
        except Exception:
            self._give_up()
            return EMPTY

    def stop(self) -> None:
        try:
            self._drafter.stop()
        except Exception:
            self._give_up()

    def _give_up(self) -> None:
        logger.exception("request %s goes on without drafts", self._request_id)
        self._drafter = NoDrafter()

"""A thread in which the predictor goes on learning, beside the engine's and at the lowest priority."""

import contextlib
import logging
import os
import threading
import time
from pathlib import Path

from verdraft.spec.hindsight import LabelledState
from verdraft.spec.learning import OnlineLearner
from verdraft.spec.predictor import PayoffPredictor, PredictorError, load_predictor

logger = logging.getLogger("verdraft.learning")

EVERY = 64  # new states for one round of learning
SAVE_SECONDS = 60.0
_LOWEST = 19


class BackgroundLearner:
    """Learns whenever EVERY states have come. With a `file`, what has won is kept there, at most every SAVE_SECONDS and
    at the end."""

    def __init__(self, learner: OnlineLearner, file: Path | None = None) -> None:
        self._learner = learner
        self._file = file
        self._saved, self._saved_at = learner.num_won, time.monotonic()
        self._fresh = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="verdraft-learner", daemon=True)

    def add(self, state: LabelledState) -> None:
        """Called by the engine's thread; never waits for learning."""
        self._learner.add(state)
        if self._learner.buffer.num_added % EVERY == 0:
            self._fresh.set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after its round, and keep what was learnt."""
        self._closed = True
        self._fresh.set()
        self._thread.join()
        self._save()

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # where a thread has no priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        while self._wait():
            try:
                self._learner.improve()
            except Exception:  # drafts are free to be wrong, and predictions of them too
                logger.exception("the predictor has stopped learning")
                return
            if time.monotonic() - self._saved_at > SAVE_SECONDS:
                self._save()

    def _wait(self) -> bool:
        self._fresh.wait()
        self._fresh.clear()
        return not self._closed

    def _save(self) -> None:
        if self._file is None or self._saved == self._learner.num_won:
            return
        self._saved, self._saved_at = self._learner.num_won, time.monotonic()
        try:
            self._learner.champion.save(self._file)
        except OSError as error:
            logger.warning("the predictor cannot be kept in %s: %s", self._file, error)


def last_predictor(file: Path, otherwise: PayoffPredictor) -> PayoffPredictor:
    """What was kept in `file`. A file that is missing or damaged is no error: then learning starts anew."""
    if not file.exists():
        return otherwise
    try:
        return load_predictor(file)
    except PredictorError as error:
        logger.warning("%s; going on with the predictor that comes with verdraft", error)
        return otherwise

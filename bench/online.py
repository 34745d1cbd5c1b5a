"""What online learning would bring on replayed answers: the predictor meets one workload, draft by draft."""

import time
import timeit
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verdraft.spec.hindsight import LabelledState
from verdraft.spec.learning import Labelled, OnlineLearner, losses
from verdraft.spec.predictor import PayoffPredictor
from verdraft.spec.replay import States

ROUND = 64  # drafts between two rounds of learning, as in the server
CYCLE = 3  # about every third position begins a cycle


@dataclass(frozen=True, slots=True)
class Gain:
    """Mean loss (mostly cross-entropy of survival) on drafts before anything was learnt from them."""

    fixed: float
    learning: float
    num_won: int
    round_seconds: float  # of one core, for a round of learning


def learning_gain(states: States, predictor: PayoffPredictor, numbers: Sequence[int]) -> Gain:
    """The answers with these `numbers`, one after the other, for the predictor as it is and for one that learns."""
    learner = OnlineLearner(predictor, lambda better: None)
    rows = np.flatnonzero(np.isin(states.answer, numbers))[::CYCLE]
    fixed, learning, seconds = list[float](), list[float](), 0.0
    for first in range(0, len(rows), ROUND):
        chosen = rows[first : first + ROUND]
        fresh = Labelled(states.features[chosen], states.drafted[chosen], states.accepted[chosen])
        fixed += losses(predictor, fresh).tolist()
        learning += losses(learner.champion, fresh).tolist()
        for features, drafted, accepted in zip(*fresh, strict=True):
            learner.add(LabelledState(features, int(drafted), int(accepted), 0.0))
        began = time.thread_time()
        learner.improve()
        seconds += time.thread_time() - began
    num, rounds = max(1, len(fixed)), max(1, -(-len(rows) // ROUND))
    return Gain(sum(fixed) / num, sum(learning) / num, learner.num_won, seconds / rounds)


def prediction_seconds(states: States, predictor: PayoffPredictor, drafts: int) -> float:
    """Of one call for so many drafts; the least of five."""
    rows = np.resize(states.features, (drafts, states.features.shape[1]))
    return min(timeit.repeat(lambda: predictor.predict(rows), number=100, repeat=5)) / 100

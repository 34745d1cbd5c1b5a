"""The predictor goes on learning from what the server sees (DESIGN section 6; PAPERS 1.8c). Numpy alone, any thread.

A challenger learns by gradient steps on a bounded buffer of labelled states. Every state first judges and then teaches:
champion and challenger are compared on states that neither has learnt, and the better one predicts.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verdraft.spec.features import FEATURES, Floats
from verdraft.spec.hindsight import LabelledState
from verdraft.spec.predictor import LENGTHS, MEAN_UNIT, Layer, PayoffPredictor, product, sigmoid

CAPACITY = 32_768  # states: about 4 MB
BATCH = 128
STEPS = 4  # gradient steps each time
RATE = 2e-4  # of learning
_MEAN = 0.1  # weight of the mean's squared error: few long drafts make most of it, and survival is what trims
_FEWEST = 256  # states before anything is learnt from them
_MEMORY = 0.998  # weight of earlier states' losses when a fresh one comes
_TRIAL = 512  # fresh states that a challenger is judged by before it may win or lose
_MARGIN = 0.01  # by so much of the loss it must be better to win, and worse to start anew

Ints = NDArray[np.int32]


class Labelled(NamedTuple):
    """n labelled states."""

    features: Floats  # [n, F]
    drafted: Ints  # [n]
    accepted: Ints  # [n]


class Buffer:
    """The latest `capacity` states; one thread adds, another reads."""

    def __init__(self, capacity: int) -> None:
        self._states = Labelled(
            np.zeros((capacity, len(FEATURES)), np.float32), np.zeros(capacity, np.int32), np.zeros(capacity, np.int32)
        )
        self._lock = threading.Lock()
        self.capacity = capacity
        self.num_added = 0

    def add(self, state: LabelledState) -> None:
        """Takes the place of the oldest when full."""
        with self._lock:
            slot = self.num_added % self.capacity
            self._states.features[slot] = state.features
            self._states.drafted[slot], self._states.accepted[slot] = state.drafted, state.accepted
            self.num_added += 1

    def __len__(self) -> int:
        return min(self.num_added, self.capacity)

    def sample(self, rng: np.random.Generator, num: int) -> Labelled:
        """`num` states, drawn evenly with replacement."""
        return self._at(rng.integers(0, len(self), num))

    def between(self, first: int, last: int) -> Labelled:
        """Those with these numbers, `last` excluded, as far as they are still there."""
        return self._at(np.arange(max(first, self.num_added - self.capacity), last) % self.capacity)

    def _at(self, slots: NDArray[np.int64]) -> Labelled:
        with self._lock:
            features, drafted, accepted = self._states
            return Labelled(features[slots], drafted[slots], accepted[slots])


class OnlineLearner:
    """add() every labelled state, improve() now and then; `publish` gets each predictor that has won.

    Deterministic for a given order of calls.
    """

    def __init__(
        self,
        predictor: PayoffPredictor,
        publish: Callable[[PayoffPredictor], None],
        capacity: int = CAPACITY,
        rate: float = RATE,
        seed: int = 0,
    ) -> None:
        self.buffer = Buffer(capacity)
        self.champion = predictor
        self.num_won = 0
        self._publish = publish
        self._rate = rate
        self._rng = np.random.default_rng(seed)
        self._judged = 0
        self._challenge()

    def _challenge(self) -> None:
        self._challenger = _Challenger(self.champion, self._rate)
        self._trial = _Trial()

    def add(self, state: LabelledState) -> None:
        """Cheap: one row is copied."""
        self.buffer.add(state)

    def improve(self) -> None:
        """Some milliseconds: judge by the fresh states, then learn from a sample of all."""
        if len(self.buffer) < _FEWEST:
            return
        first, self._judged = self._judged, self.buffer.num_added
        self._judge(self.buffer.between(first, self._judged))
        for _ in range(STEPS):
            self._challenger.step(self.buffer.sample(self._rng, BATCH))

    def _judge(self, fresh: Labelled) -> None:
        if not len(fresh.drafted):
            return
        challenger = self._challenger.predictor()
        self._trial.add(losses(self.champion, fresh), losses(challenger, fresh))
        worth = self._trial.worth
        if worth > _MARGIN:
            seen = {"learned_from": self.buffer.num_added}
            self.champion = challenger.with_record({**self.champion.record, "online": seen})
            self.num_won += 1
            self._publish(self.champion)
            self._trial = _Trial()
        elif not worth >= -_MARGIN:  # or no number any more
            self._challenge()


@dataclass(slots=True)
class _Trial:
    """Rolling losses of champion and challenger on fresh states."""

    champion: float = 0.0
    challenger: float = 0.0
    num: int = 0

    def add(self, champion: Floats, challenger: Floats) -> None:  # [n] each
        weights = ((1 - _MEMORY) * _MEMORY ** np.arange(len(champion))[::-1]).astype(np.float32)
        left = _MEMORY ** len(champion)
        self.champion = left * self.champion + float(weights @ champion)
        self.challenger = left * self.challenger + float(weights @ challenger)
        self.num += len(champion)

    @property
    def worth(self) -> float:
        """By which share the challenger's loss is smaller; 0 before the trial is over."""
        return 1.0 - self.challenger / max(self.champion, 1e-9) if self.num >= _TRIAL else 0.0


class _Challenger:
    """A copy of a predictor that learns with Adam."""

    def __init__(self, start: PayoffPredictor, rate: float) -> None:
        self._start = start
        self._rate = rate
        self._values = [array.copy() for layer in start.layers for array in layer]
        self._first = [np.zeros_like(array) for array in self._values]
        self._second = [np.zeros_like(array) for array in self._values]
        self._steps = 0

    def _layers(self) -> tuple[Layer, Layer, Layer]:
        w0, b0, w1, b1, w2, b2 = self._values
        return Layer(w0, b0), Layer(w1, b1), Layer(w2, b2)

    def predictor(self) -> PayoffPredictor:
        """What it has learnt so far."""
        first, second, third = (Layer(layer.weight.copy(), layer.bias.copy()) for layer in self._layers())
        return replace(self._start, layers=(first, second, third))

    def step(self, states: Labelled) -> None:
        """One step of Adam (Kingma and Ba 2015) down the mean loss of the states."""
        self._steps += 1
        for value, first, second, slope in zip(
            self._values, self._first, self._second, self._slopes(states), strict=True
        ):
            first += 0.1 * (slope - first)
            second += 0.001 * (slope * slope - second)
            size = np.sqrt(second / (1 - 0.999**self._steps)) + 1e-8
            value -= (self._rate / (1 - 0.9**self._steps)) * first / size

    def _slopes(self, states: Labelled) -> list[Floats]:
        """Of the mean loss, by every value, in their order."""
        inputs = (states.features - self._start.shift) * self._start.scale
        first, second, third = self._layers()
        one = np.maximum(product(inputs, first.weight) + first.bias, 0)
        two = np.maximum(product(one, second.weight) + second.bias, 0)
        slope = _loss_slope(product(two, third.weight) + third.bias, states)
        found: list[Floats] = []
        for layer, below in ((third, two), (second, one), (first, inputs)):
            found = [product(below.T, slope), slope.sum(0), *found]
            if below is not inputs:
                slope = product(slope, layer.weight.T) * (below > 0)
        return found


def losses(predictor: PayoffPredictor, states: Labelled) -> Floats:  # [n]
    """Of each state: cross-entropy of the hazards that its label tells of, and a little of the mean's squared error."""
    mean, survival = predictor.predict(states.features)
    before = np.concatenate((np.ones((len(mean), 1), np.float32), survival[:, :-1]), axis=1)
    hazards = np.clip(survival / np.maximum(before, 1e-12), 1e-6, 1 - 1e-6)
    judged, right = _labels(states)
    entropy = -np.where(right, np.log(hazards), np.log1p(-hazards)) * judged
    found: Floats = _MEAN * ((mean - states.accepted) / MEAN_UNIT) ** 2 + entropy.sum(1) / judged.sum(1)
    return found


def _loss_slope(out: Floats, states: Labelled) -> Floats:  # [n, 1 + LENGTHS]
    judged, right = _labels(states)
    slope = np.empty_like(out)
    slope[:, 0] = 2 * _MEAN * (out[:, 0] - states.accepted / MEAN_UNIT)
    slope[:, 1:] = (sigmoid(out[:, 1:]) - right) * judged / judged.sum(1, keepdims=True)
    return slope / np.float32(len(out))


def _labels(states: Labelled) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:  # [n, LENGTHS] each
    """Which hazards the label tells of: of the accepted tokens and of the first wrong one; and which are right."""
    lengths = np.arange(1, LENGTHS + 1)
    judged = lengths <= np.minimum(states.drafted, states.accepted + 1)[:, None]
    return judged, lengths <= states.accepted[:, None]

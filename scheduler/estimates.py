"""What suffix drafts are expected to bring: the predictor's view of them instead of the index's own estimate."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from verdraft.scheduler.sequence import Sequence
from verdraft.spec.draft import Draft
from verdraft.spec.features import NO_CLASSES, DecodeState, TokenClasses, describe
from verdraft.spec.hindsight import LabelledState
from verdraft.spec.predictor import PayoffPredictor, path_probs

HIGH_PAYOFF = 6  # accepted tokens (PAPERS 1.1)


@dataclass(slots=True)
class PredictorCounts:
    """What was predicted of suffix drafts and what came of them, once their fate is known. Lengths are sums, in tokens.

    A high payoff: how often it was predicted, came, and both.
    """

    num_states: int = 0
    predicted_tokens: float = 0.0
    accepted_tokens: int = 0
    error_tokens: float = 0.0  # differences without their signs
    high_predicted: int = 0
    high_came: int = 0
    high_hits: int = 0

    def add(self, state: LabelledState) -> None:
        """One draft whose fate is known."""
        self.num_states += 1
        self.predicted_tokens += state.predicted
        self.accepted_tokens += state.accepted
        self.error_tokens += abs(state.predicted - state.accepted)
        predicted, came = state.predicted > HIGH_PAYOFF, state.accepted >= HIGH_PAYOFF
        self.high_predicted += predicted
        self.high_came += came
        self.high_hits += predicted and came


def _unused(state: LabelledState) -> None:
    """Nobody learns."""


@dataclass(slots=True)
class Estimates:
    """Without a predictor, drafts keep the index's probabilities. `classes` are the flags of the model's tokens;
    `teach` gets every draft whose fate is known."""

    predictor: PayoffPredictor | None = None
    classes: TokenClasses = field(default_factory=lambda: NO_CLASSES)
    teach: Callable[[LabelledState], None] = _unused
    counts: PredictorCounts = field(default_factory=PredictorCounts)

    def use(self, predictor: PayoffPredictor) -> None:
        """Predict with this one from now on; any thread may say so."""
        self.predictor = predictor

    def judge(self, seqs: Seq[Sequence], drafts: Seq[Draft]) -> tuple[list[Draft], dict[int, float]]:
        """The drafts with the probabilities to go by, and the predicted accepted length where there is a prediction."""
        found, means = list(drafts), dict[int, float]()
        chosen = [i for i, draft in enumerate(drafts) if draft.tokens and draft.source == "suffix"]
        if self.predictor is None or not chosen:
            return found, means
        states = [DecodeState(s.num_prompt, s.num_output, s.hindsight.history) for s in (seqs[i] for i in chosen)]
        features = describe([drafts[i] for i in chosen], states, self.classes)
        mean, survival = self.predictor.predict(features)
        for row, i in enumerate(chosen):
            draft = drafts[i]
            found[i] = draft.expecting(path_probs(survival[row], len(draft.tokens)))
            means[i] = float(mean[row])
            seqs[i].hindsight.watch(draft.tokens, features[row], means[i])
        return found, means

    def learn(self, seq: Sequence, committed: Seq[int]) -> None:
        """The sequence goes on with these tokens: what became of its drafts."""
        for state in seq.hindsight.commit(committed):
            self.counts.add(state)
            self.teach(state)

"""How good a payoff predictor is on states that it did not learn from: error, precision and recall, calibration."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verdraft.spec.features import FEATURES, Floats
from verdraft.spec.predictor import LENGTHS, PayoffPredictor
from verdraft.spec.replay import States

HIGH = 6  # accepted tokens that make a draft's payoff high (HVD, PAPERS 1.1)
CALIBRATED = (1, 2, 4, 8, 16)  # lengths whose survival is compared with what happened
BINS = 10
SCORE = FEATURES.index("score")
PAPER = "paper: precision 78.2-87.6 %, recall 61.4-79.8 %, high payoff at 4.8-8.9 % of the positions"


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one workload's held-out states. Lengths in tokens; rates between 0 and 1."""

    workload: str
    positions: int  # output tokens that a draft might begin at
    drafts: int
    mean_accepted: float
    error: float  # mean absolute error of the predicted mean
    score_error: float  # the same of the suffix source's own score
    rms_error: float
    precision: float  # of the drafts with a predicted mean of at least HIGH, those of high payoff
    recall: float
    score_precision: float
    score_recall: float
    high_share: float  # of the positions, those with a draft of high payoff
    calibration_error: float  # mean over CALIBRATED and bins of |predicted - observed|, weighted by drafts


Bin = tuple[float, float, int]  # mean prediction, observed share, drafts


def qualities(states: States, predictor: PayoffPredictor) -> list[Quality]:
    """Of every workload, and of all."""
    mean, survival = predictor.predict(states.features)
    groups = [(w, states.workload == w) for w in sorted({answer.workload for answer in states.answers})]
    groups.append(("all", np.ones(len(mean), bool)))
    chosen = [(workload, kept & states.held_out) for workload, kept in groups]
    return [_quality(workload, kept, states, mean, survival) for workload, kept in chosen if kept.any()]


def _quality(workload: str, kept: NDArray[np.bool_], states: States, mean: Floats, survival: Floats) -> Quality:
    accepted, score, predicted = states.accepted[kept], states.features[kept, SCORE], mean[kept]
    high = accepted >= HIGH
    precision, recall = _precision_recall(predicted >= HIGH, high)
    score_precision, score_recall = _precision_recall(score >= HIGH, high)
    tables = [calibration(states, survival, length, kept) for length in CALIBRATED]
    bins = [entry for table in tables for entry in table]
    positions = _positions(states, workload)
    return Quality(
        workload=workload,
        positions=positions,
        drafts=len(accepted),
        mean_accepted=float(accepted.mean()),
        error=float(abs(predicted - accepted).mean()),
        score_error=float(abs(score - accepted).mean()),
        rms_error=float(((predicted - accepted) ** 2).mean() ** 0.5),
        precision=precision,
        recall=recall,
        score_precision=score_precision,
        score_recall=score_recall,
        high_share=float(high.sum() / max(1, positions)),
        calibration_error=sum(n * abs(p - o) for p, o, n in bins) / max(1, sum(n for _, _, n in bins)),
    )


def _precision_recall(said: NDArray[np.bool_], true: NDArray[np.bool_]) -> tuple[float, float]:
    hits = float((said & true).sum())
    return hits / max(1.0, said.sum()), hits / max(1.0, true.sum())


def _positions(states: States, workload: str) -> int:
    """Output tokens but each answer's first, which the prefill gives."""
    answers = zip(states.answers, states.lengths.tolist(), strict=True)
    return sum(n - 1 for answer, n in answers if answer.held_out and workload in (answer.workload, "all"))


def calibration(states: States, survival: Floats, length: int, kept: NDArray[np.bool_]) -> list[Bin]:
    """P(accepted >= length) in BINS equal bins of the prediction, of the drafts that are long enough; empty ones are
    left out."""
    chosen = kept & (states.drafted >= length)
    predicted, observed = survival[chosen, length - 1], states.accepted[chosen] >= length
    bins = np.minimum((predicted * BINS).astype(int), BINS - 1)
    return [
        (float(predicted[bins == b].mean()), float(observed[bins == b].mean()), int((bins == b).sum()))
        for b in range(BINS)
        if (bins == b).any()
    ]


def report(states: States, predictor: PayoffPredictor) -> tuple[dict[str, Any], list[str]]:
    """For the predictor's record, and lines for people."""
    found = qualities(states, predictor)
    survival = predictor.predict(states.features).survival
    tables = {length: calibration(states, survival, length, states.held_out) for length in CALIBRATED}
    record = {"held_out": [_rounded(asdict(quality)) for quality in found]}
    return record, [*_quality_lines(found), "", *_calibration_lines(tables)]


def charts(states: States, predictor: PayoffPredictor) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Calibration lines: predicted against observed, by length."""
    survival = predictor.predict(states.features).survival
    lines = {
        f"l = {length}": [(p, o) for p, o, _ in calibration(states, survival, length, states.held_out)]
        for length in (1, 4, LENGTHS)
    }
    return {"P(accepted >= l)": {name: line for name, line in lines.items() if line}}


def _quality_lines(found: Sequence[Quality]) -> Iterator[str]:
    yield f"held-out states; a draft's payoff is high from {HIGH} accepted tokens on; (in brackets: by suffix score)"
    yield (
        f"{'workload':14}{'positions':>10}{'drafts':>9}{'accepted':>9}{'error':>15}{'rms':>7}"
        f"{'precision':>15}{'recall':>15}{'high':>7}{'calibr.':>9}"
    )
    for q in found:
        yield (
            f"{q.workload:14}{q.positions:10}{q.drafts:9}{q.mean_accepted:9.2f}{q.error:8.2f} ({q.score_error:4.2f})"
            f"{q.rms_error:7.2f}{q.precision:8.1%} ({q.score_precision:4.0%}){q.recall:8.1%} ({q.score_recall:4.0%})"
            f"{q.high_share:7.1%}{q.calibration_error:9.3f}"
        )
    yield PAPER


def _calibration_lines(tables: dict[int, list[Bin]]) -> Iterator[str]:
    yield "P(accepted >= l): predicted > observed (drafts)"
    for length, table in tables.items():
        yield f"l = {length:2}  " + "  ".join(f"{p:.2f} > {o:.2f} ({n})" for p, o, n in table)


def _rounded(quality: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in quality.items()}

"""Trains the payoff predictor on labelled states (HVD, PAPERS 1.3, and its survival curve, 1.8b)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import trange

from verdraft.spec.features import FEATURES
from verdraft.spec.predictor import HIDDEN, LENGTHS, MEAN_UNIT, Layer, PayoffPredictor
from verdraft.spec.replay import States


@dataclass(frozen=True, slots=True)
class PayoffRecipe:
    """Everything that decides the trained bits, next to the states. The defaults are the paper's."""

    epochs: int = 20
    batch: int = 65_536
    learning_rate: float = 1e-3
    seed: int = 42


def train_predictor(states: States, recipe: PayoffRecipe, progress: bool = True) -> PayoffPredictor:
    """Learns from the states that are not held out. Deterministic. At least one state is needed."""
    learn = ~states.held_out
    inputs = torch.from_numpy(states.features[learn])
    drafted, accepted = (torch.from_numpy(column[learn]).float() for column in (states.drafted, states.accepted))
    shift, deviation = inputs.mean(0), inputs.std(0, correction=0)
    scale = torch.where(deviation > 1e-6, 1 / deviation, torch.zeros(()))  # what never varies says nothing
    inputs = (inputs - shift) * scale
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        network = _network()
        _fit(network, inputs, drafted, accepted, recipe, progress)
    layers = [Layer(_array(m.weight.T), _array(m.bias)) for m in network if isinstance(m, nn.Linear)]
    return PayoffPredictor(_array(shift), _array(scale), (layers[0], layers[1], layers[2]))


def _network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(len(FEATURES), HIDDEN), nn.ReLU()),
        *(nn.Linear(HIDDEN, HIDDEN), nn.ReLU()),
        nn.Linear(HIDDEN, 1 + LENGTHS),
    )


def _fit(
    network: nn.Module, inputs: Tensor, drafted: Tensor, accepted: Tensor, recipe: PayoffRecipe, progress: bool
) -> None:
    optimizer = torch.optim.Adam(network.parameters(), recipe.learning_rate)
    for _ in (bar := trange(recipe.epochs, desc="training the predictor", disable=not progress)):
        for part in torch.split(torch.randperm(len(inputs)), recipe.batch):
            loss = payoff_loss(network(inputs[part]), drafted[part], accepted[part])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.4f}")


def payoff_loss(out: Tensor, drafted: Tensor, accepted: Tensor) -> Tensor:  # [n, 1 + LENGTHS], [n], [n]
    """Squared error of the mean (in MEAN_UNIT), and cross-entropy of every hazard that the label tells of: of the
    accepted tokens and of the first wrong one."""
    lengths = torch.arange(1, LENGTHS + 1)
    judged = lengths <= torch.minimum(drafted, accepted + 1)[:, None]
    right = (lengths <= accepted[:, None]).float()
    hazards = F.binary_cross_entropy_with_logits(out[:, 1:], right, reduction="none")
    return F.mse_loss(out[:, 0], accepted / MEAN_UNIT) + (hazards * judged).sum() / judged.sum()


def _array(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.ascontiguousarray(tensor.detach().numpy(), np.float32)


def about(states: States, recipe: PayoffRecipe) -> Mapping[str, Any]:
    """Data and recipe, for the predictor's record."""
    counts = {
        workload: {"learn": int((~states.held_out & (states.workload == workload)).sum())}
        for workload in sorted({answer.workload for answer in states.answers})
    }
    return {
        "recipe": {name: getattr(recipe, name) for name in PayoffRecipe.__slots__},
        "states": counts,
        "answers": len(states.answers),
    }

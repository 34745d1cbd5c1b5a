"""Trains the payoff predictor on labelled states (HVD, PAPERS 1.3, and its survival curve, 1.8b)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """Everything that decides the trained bits, next to the states. The first four defaults are the paper's."""

    epochs: int = 20
    batch: int = 65_536
    learning_rate: float = 1e-3  # at the start; a cosine falls to nothing
    seed: int = 42
    weight_decay: float = 0.01
    jitter: float = 0.1  # standard deviations of noise on phi, so that lengths seen seldom are not learnt by heart
    balance: float = 0.5  # a conversation of n states counts as much as n ** (1 - balance)


class Labels(NamedTuple):
    """Of n states: how many tokens were drafted, and how many of them are right."""

    drafted: Tensor  # [n]
    accepted: Tensor  # [n]

    def of(self, part: Tensor) -> "Labels":
        """Those of the states with these numbers."""
        return Labels(self.drafted[part], self.accepted[part])


def train_predictor(states: States, recipe: PayoffRecipe, progress: bool = True) -> PayoffPredictor:
    """Learns from the states that are not held out. Deterministic. At least one state is needed."""
    learn = ~states.held_out
    inputs = torch.from_numpy(states.features[learn])
    labels = Labels(*(torch.from_numpy(column[learn]).float() for column in (states.drafted, states.accepted)))
    shift, deviation = inputs.mean(0), inputs.std(0, correction=0)
    scale = torch.where(deviation > 1e-6, 1 / deviation, torch.zeros(()))  # what never varies says nothing
    inputs = (inputs - shift) * scale
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        network = _network()
        _fit(network, inputs, labels, _weights(states, recipe.balance)[learn], recipe, progress)
    layers = [Layer(_array(m.weight.T), _array(m.bias)) for m in network if isinstance(m, nn.Linear)]
    return PayoffPredictor(_array(shift), _array(scale), (layers[0], layers[1], layers[2]))


def _network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(len(FEATURES), HIDDEN), nn.ReLU()),
        *(nn.Linear(HIDDEN, HIDDEN), nn.ReLU()),
        nn.Linear(HIDDEN, 1 + LENGTHS),
    )


def _weights(states: States, balance: float) -> Tensor:  # [N]
    names = {answer.conversation for answer in states.answers}
    numbers = {name: number for number, name in enumerate(sorted(names))}
    conversation = np.array([numbers[answer.conversation] for answer in states.answers])[states.answer]
    return torch.from_numpy(np.bincount(conversation)[conversation] ** -balance).float()


def _fit(
    network: nn.Module, inputs: Tensor, labels: Labels, weights: Tensor, recipe: PayoffRecipe, progress: bool
) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.epochs * -(-len(inputs) // recipe.batch))
    weights = weights / weights.mean()
    for _ in (bar := trange(recipe.epochs, desc="training the predictor", disable=not progress)):
        for part in torch.split(torch.randperm(len(inputs)), recipe.batch):
            seen = inputs[part] + recipe.jitter * torch.randn(len(part), inputs.shape[1])
            loss = payoff_loss(network(seen), labels.of(part), weights[part])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        bar.set_postfix(loss=f"{loss.item():.4f}")


def payoff_loss(out: Tensor, labels: Labels, weights: Tensor) -> Tensor:  # [n, 1 + LENGTHS], [n]
    """Squared error of the mean (in MEAN_UNIT), and cross-entropy of every hazard that the label tells of: of the
    accepted tokens and of the first wrong one."""
    lengths, accepted = torch.arange(1, LENGTHS + 1), labels.accepted
    judged = (lengths <= torch.minimum(labels.drafted, accepted + 1)[:, None]) * weights[:, None]
    right = (lengths <= accepted[:, None]).float()
    hazards = F.binary_cross_entropy_with_logits(out[:, 1:], right, reduction="none")
    squared = weights * (out[:, 0] - accepted / MEAN_UNIT) ** 2
    return squared.sum() / weights.sum() + (hazards * judged).sum() / judged.sum()


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

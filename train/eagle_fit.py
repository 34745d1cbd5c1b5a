"""Teaches an EAGLE3 head what the target says: training-time test (PAPERS 4.5) over recorded sequences."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from verdraft.train.eagle_net import Chains, EagleNet
from verdraft.train.eagle_rows import Rows
from verdraft.train.eagle_start import solve

SAVE_EVERY = 100  # steps


@dataclass(frozen=True, slots=True)
class EagleRecipe:
    """How long and how hard; everything that decides the trained bits, next to the rows."""

    inner: int = 768  # width of the MLP
    unroll: int = 3  # steps that a chain takes
    decay: float = 0.8  # what each counts, relative to the one before
    epochs: int = 4
    batch: int = 800  # anchors
    learning_rate: float = 6e-4  # at its peak; a cosine falls to nothing
    weight_decay: float = 0.05
    ridge: float = 0.02  # of the least squares that training starts from
    hard: float = 0.3  # share of the loss that is cross-entropy with the target's first choice, not its distribution
    seed: int = 0


def unrolled(
    net: EagleNet, rows: Rows, anchors: Tensor, depth: int, kept: Callable[[Chains, int], Tensor]
) -> Iterator[Chains]:
    """The chains from some anchors of `rows` after 1 to `depth` steps along the recorded text. Before each step but the
    first, `kept` [A] says which go on; step i guesses the token behind row anchor + i."""
    device = net.fc.weight.device
    aux, tokens = rows.aux.to(device), rows.next.to(device)
    context, chains = net.start(aux, tokens, rows.lengths.tolist(), anchors.to(device))
    yield chains
    for index in range(1, depth):
        chains = chains[kept(chains, index + 1).to(device)]
        chains = net.step(context, chains, tokens[chains.anchors + index])
        yield chains


def loss_of(net: EagleNet, rows: Rows, recipe: EagleRecipe, draw: torch.Generator) -> tuple[Tensor, float]:
    """The sum over steps, and the mean of the first, in nats.

    Rows of prompts teach too: what the target says of them is known, and they double what there is to learn from. That
    a random share of `decay` of the chains takes the next step gives it the weight of decay^i, and saves time.
    """

    def kept(chains: Chains, index: int) -> Tensor:
        anchors = chains.anchors.cpu()
        return (rows.room(anchors) >= index) & (torch.rand(len(anchors), generator=draw) < recipe.decay)

    losses, anchors = [], rows.anchors
    with mixed_precision(net):
        for index, chains in enumerate(unrolled(net, rows, anchors, recipe.unroll, kept), 1):
            guessed = chains.anchors.cpu() + index
            wanted = wanted_shares(rows, guessed, recipe.hard).to(chains.hidden.device)
            logits = net.logits(chains).float()
            picked = logits.gather(-1, rows.likely[guessed].to(logits.device))
            lost = wanted.sum(-1) * logits.logsumexp(-1) - (wanted * picked).sum(-1)
            losses.append(lost.sum() / len(anchors))
    return torch.stack(losses).sum(), float(losses[0].detach())


def wanted_shares(rows: Rows, guessed: Tensor, hard: float) -> Tensor:  # [A] -> [A, LIKELY]
    """The target's distribution over its likely tokens, drawn towards the first of them; zeros where its first choice
    cannot be drafted."""
    shares = rows.shares[guessed]
    wanted = (1 - hard) * shares / shares.sum(-1, keepdim=True)
    wanted[:, 0] += hard
    return wanted * (rows.first[guessed] >= 0)[:, None]


def mixed_precision(net: EagleNet) -> torch.autocast:
    """Products in bfloat16 where the machine has them."""
    device = net.fc.weight.device.type
    quick = device != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.autocast(device, torch.bfloat16, enabled=quick)


def fit(net: EagleNet, rows: Rows, recipe: EagleRecipe, kept_in: Path, progress: bool = True) -> None:
    """Train `net`. The file `kept_in` lets an interrupted training go on where it was, with the same outcome."""
    optimizer = torch.optim.AdamW(
        net.parameters(), recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
    )
    claim = json.dumps({"recipe": asdict(recipe), "rows": [len(rows.next), int(rows.next.sum())]})
    done = _resume(net, optimizer, kept_in, claim)
    if not done:
        solve(net, rows, recipe.ridge, recipe.seed)
    total = sum(1 for _ in _batches(rows, recipe))
    with tqdm(total=total, initial=done, desc="training the EAGLE3 head", disable=not progress) as bar:
        for step, chosen in enumerate(_batches(rows, recipe)):
            if step < done:
                continue
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * _rate(step, total)
            loss, first = loss_of(net, rows.part(chosen), recipe, torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            bar.update()
            bar.set_postfix(first=f"{first:.3f}", all=f"{loss.item():.3f}", refresh=False)
            if (step + 1) % SAVE_EVERY == 0 or step + 1 == total:
                _keep(net, optimizer, kept_in, claim, step + 1)


def _batches(rows: Rows, recipe: EagleRecipe) -> Iterator[list[int]]:
    for epoch in range(recipe.epochs):
        draw = torch.Generator().manual_seed(recipe.seed * 1009 + epoch)
        yield from rows.groups(torch.randperm(len(rows.lengths), generator=draw).tolist(), recipe.batch)


def _rate(step: int, steps: int) -> float:
    return min((step + 1) / max(1, steps // 20), 0.5 + 0.5 * math.cos(math.pi * step / steps))


def _keep(net: EagleNet, optimizer: torch.optim.Optimizer, file: Path, claim: str, done: int) -> None:
    """Whole or not at all."""
    partial = file.with_suffix(".partial")
    state = {"claim": claim, "done": done, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, partial)
    partial.rename(file)


def _resume(net: EagleNet, optimizer: torch.optim.Optimizer, file: Path, claim: str) -> int:
    """Steps that were done; none if the file is of another training."""
    if not file.is_file():
        return 0
    state: dict[str, Any] = torch.load(file, map_location=net.fc.weight.device, weights_only=True)
    if state["claim"] != claim:
        return 0
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["done"])

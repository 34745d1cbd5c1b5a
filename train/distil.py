"""Teaches an exit head what the target thinks: distillation over recorded rows (train/collect.py)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from verdraft.model.exit_head import TokenIds
from verdraft.train.adapter import Adapter

CHUNK = 1024  # rows


@dataclass(frozen=True, slots=True)
class Recipe:
    """How long and how hard; everything that decides the trained bits, next to the rows."""

    inner: int = 512  # width of the MLP
    epochs: int = 4
    batch: int = 512  # rows
    learning_rate: float = 2e-3  # at its peak; a cosine falls to nothing
    weight_decay: float = 0.05
    dropout: float = 0.1  # of the inputs and outputs of the MLP
    ridge: float = 0.02  # of the least squares that training starts from
    hard: float = 0.5  # share of the loss that is cross-entropy with the target's first choice; KL is the rest
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """The frozen part: the target's output matrix over a vocabulary."""

    token_ids: TokenIds  # [R] ascending
    rows: Tensor  # [R, hidden]
    norm_eps: float


@dataclass(frozen=True, slots=True)
class Losses:
    """Means over rows, in nats: KL from the target's distribution inside the vocabulary (weighted with the mass that
    it has there), and cross-entropy with the target's first choice (of the rows where the vocabulary holds it)."""

    kl: float
    cross_entropy: float


def frequent_tokens(rows: Mapping[str, Tensor], vocab_size: int, size: int) -> TokenIds:
    """The `size` tokens that the model writes most often (ties: the smaller id), ascending."""
    written = torch.cat([rows["next"][rows["own"]], rows["argmax"]]).long()
    counts = torch.bincount(written, minlength=vocab_size).numpy()
    return np.sort(np.argsort(-counts, kind="stable")[:size])


def solved(rows: Mapping[str, Tensor], layer: int, target: Target, recipe: Recipe) -> Adapter:
    """A head for `layer` whose linear parts are solved for in one go: where training starts, and fair to compare."""
    device = target.rows.device
    adapter = Adapter(target.rows.cpu(), recipe.inner, target.norm_eps, recipe.dropout, recipe.seed).to(device).eval()
    columns = (torch.split(rows[name], CHUNK) for name in (f"layer.{layer}", "final"))
    hidden, final = ((part.to(device).float() for part in column) for column in columns)
    adapter.solve(hidden, final, recipe.ridge)
    return adapter


def distil(rows: Mapping[str, Tensor], layer: int, target: Target, recipe: Recipe, progress: bool = True) -> Adapter:
    """A head for `layer`, trained on all `rows`."""
    adapter = solved(rows, layer, target, recipe)
    optimizer = torch.optim.AdamW(adapter.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)
    num, draw = len(rows["next"]), torch.Generator().manual_seed(recipe.seed)
    steps = recipe.epochs * math.ceil(num / recipe.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    torch.manual_seed(recipe.seed)  # of what is dropped
    adapter.train()
    with tqdm(total=steps, desc=f"training the head of layer {layer}", disable=not progress) as bar:
        for _ in range(recipe.epochs):
            for part in torch.split(torch.randperm(num, generator=draw), recipe.batch):
                kl, hard = batch_losses(adapter, rows, part.sort().values, layer, target)
                loss = (1 - recipe.hard) * kl + recipe.hard * hard
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(adapter.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                bar.update()
                bar.set_postfix(kl=f"{kl.item():.3f}", ce=f"{hard.item():.3f}", refresh=False)
    return adapter.eval()


def _rate(step: int, steps: int) -> float:
    warm = max(1, steps // 20)
    return min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def batch_losses(
    adapter: Adapter, rows: Mapping[str, Tensor], part: Tensor, layer: int, target: Target
) -> tuple[Tensor, Tensor]:
    """KL and cross-entropy of the rows with these numbers; means, as `Losses` tells."""
    device = target.rows.device
    logq = adapter(rows[f"layer.{layer}"][part].to(device).float()).log_softmax(-1)
    with torch.no_grad():
        logits = F.linear(rows["final"][part].to(device).float(), target.rows)
        logp = logits - rows["lse"][part].to(device).unsqueeze(-1)
        probs = logp.exp()
        first = columns_of(target.token_ids, rows["argmax"][part]).to(device)
        known = first >= 0
        mass = probs.sum(-1, keepdim=True)
    kl = (probs * (logp - mass.log() - logq)).sum(-1).mean()
    hard = -logq.gather(-1, first.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return kl, (hard * known).sum() / known.sum().clamp(min=1)


def columns_of(token_ids: TokenIds, tokens: Tensor) -> Tensor:
    """Which column of the logits each token has; -1 for those outside the vocabulary."""
    wanted = tokens.numpy()
    at = np.searchsorted(token_ids, wanted).clip(max=len(token_ids) - 1)
    return torch.from_numpy(np.where(token_ids[at] == wanted, at, -1))


@dataclass(frozen=True, slots=True)
class Judged:
    """A head on rows: its first choice at each, as token ids, and its losses over its whole vocabulary."""

    chosen: TokenIds
    losses: Losses


@torch.no_grad()
def judge(adapter: Adapter, rows: Mapping[str, Tensor], layer: int, target: Target, within: TokenIds) -> Judged:
    """`within` are the token ids that may be chosen, a part of the target's."""
    device = target.rows.device
    columns = columns_of(target.token_ids, torch.from_numpy(within)).to(device)
    parts = torch.split(torch.arange(len(rows["next"])), CHUNK)
    losses = [torch.stack(batch_losses(adapter, rows, part, layer, target)) * len(part) for part in parts]
    streams = (rows[f"layer.{layer}"][part].to(device).float() for part in parts)
    chosen = [adapter(stream)[:, columns].argmax(-1).cpu() for stream in streams]
    kl, hard = (torch.stack(losses).sum(0) / len(rows["next"])).tolist()
    return Judged(within[torch.cat(chosen).numpy()], Losses(kl, hard))

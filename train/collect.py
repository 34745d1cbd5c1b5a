"""The model's own continuations of many prompts with the residual streams that made them, in resumable shards.

One loop of plain batched decoding, because here every pass must also leave its streams behind. A shard is a function
of the model, its prompts and the plan, so an interrupted collection ends with the same files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from verdraft.model.transformer import Transformer
from verdraft.scheduler.batches import ragged_batch

TEMPERATURES = (0.0, 0.7, 0.0, 1.0)  # in turn: half greedy, half sampled
SKIPPED = 4  # rows at a sequence's begin: nobody drafts there, and attention's sink makes them odd

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Collection:
    """What is collected: everything that decides the bits of a shard, next to model and prompts."""

    layers: tuple[int, ...]  # ascending; states are kept behind layer - 1 of each
    max_tokens: int = 192  # of a continuation
    seed: int = 0
    shard_prompts: int = 64  # continued together


def write_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.rename(path)


def load_shards(paths: Sequence[Path], columns: Sequence[str] = ()) -> dict[str, Tensor]:
    """All rows of some shards, in all columns or in some, and `greedy` [n]: written at temperature 0. `columns` must
    hold `sequence`."""
    shards = [_read(path, columns) for path in paths]
    rows = {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
    rows["greedy"] = torch.tensor(TEMPERATURES)[rows["sequence"] % len(TEMPERATURES)] == 0
    return rows


def _read(path: Path, columns: Sequence[str]) -> dict[str, Tensor]:
    with safe_open(str(path), framework="pt") as shard:
        return {name: shard.get_tensor(name) for name in columns or shard.keys()}


@torch.inference_mode()
def collect_shard(
    model: Transformer, prompts: Sequence[Sequence[int]], first: int, plan: Collection
) -> dict[str, Tensor]:
    """Continue `prompts`, whose numbers count from `first`. One row for each position with a known next token.

    `layer.K` [n, hidden] half: the stream behind layer K - 1; `final` [n, hidden] half: behind the final norm; `lse`
    and `argmax` [n]: of the target's logits; `next` [n]: the token as written; `own` [n]: the model wrote it;
    `sequence` [n]: the prompt's number. Sorted by sequence and position.
    """
    collector = _Collector(model, plan, prompts, first)
    alive = [number for number, prompt in enumerate(prompts) if collector.start(number, prompt)]
    for _ in range(plan.max_tokens - 1):
        if not alive:
            break
        alive = collector.step(alive)
    return collector.rows()


class _Collector:
    """Sequences of fixed places in one pool, and what their passes left."""

    def __init__(self, model: Transformer, plan: Collection, prompts: Sequence[Sequence[int]], first: int) -> None:
        longest = max(map(len, prompts)) + plan.max_tokens
        self.block = model.kernels.page_size
        width = -(-longest // self.block)
        self.model = model
        self.layers = plan.layers
        self.tables = np.arange(len(prompts) * width).reshape(len(prompts), width)
        self.pool = model.new_pool(self.tables.size, self.block)
        self.temperature = torch.tensor([TEMPERATURES[(first + n) % len(TEMPERATURES)] for n in range(len(prompts))])
        self.draw = torch.Generator().manual_seed(plan.seed * 1_000_003 + first)
        self.first = first
        self.length = np.zeros(len(prompts), np.int64)
        self.last = np.zeros(len(prompts), np.int64)
        self.found: list[dict[str, Tensor]] = []

    def start(self, number: int, prompt: Sequence[int]) -> bool:
        """Prefill, and the first token; whether the sequence goes on."""
        passed = self._pass(np.array([number]), np.array(prompt), np.array([len(prompt)]))
        token = self._pick(passed.pop("logits")[-1:], np.array([number]))
        passed["next"] = torch.tensor([*prompt[1:], *token], dtype=torch.int32)
        passed["own"] = torch.arange(1, len(prompt) + 1) >= len(prompt)
        begin = min(SKIPPED, len(prompt) - 1)
        self.found.append({name: column[begin:] for name, column in passed.items()})
        self.last[number] = token[0]
        return self._goes_on(number)

    def step(self, alive: Sequence[int]) -> list[int]:
        """One more token each; those that go on."""
        numbers = np.array(alive)
        passed = self._pass(numbers, self.last[numbers], np.ones(len(alive), np.int64))
        self.last[numbers] = self._pick(passed.pop("logits"), numbers)
        passed["next"] = torch.from_numpy(self.last[numbers]).int()
        passed["own"] = torch.ones(len(alive), dtype=torch.bool)
        self.found.append(passed)
        return [number for number in alive if self._goes_on(number)]

    def rows(self) -> dict[str, Tensor]:
        """Everything, by sequence; inside one by position, because that is how it came."""
        whole = {name: torch.cat([part[name] for part in self.found]) for name in self.found[0]}
        order = torch.argsort(whole["sequence"], stable=True)
        return {name: column[order].contiguous() for name, column in whole.items()}

    def _goes_on(self, number: int) -> bool:
        config = self.model.config
        return self.last[number] not in config.eos_token_ids and self.length[number] < config.max_model_len

    def _pass(self, numbers: Ints, tokens: Ints, num: Ints) -> dict[str, Tensor]:
        model = self.model
        batch = ragged_batch(num, self.length[numbers], self.tables[numbers], self.block, model.device)
        self.length[numbers] += num
        hidden = model.embed(torch.from_numpy(tokens).to(model.device), batch.positions)
        found, done = {}, 0
        for layer in self.layers:
            hidden, done = model.forward(hidden, batch, self.pool, done, layer), layer
            found[f"layer.{layer}"] = _half(hidden)
        final = model.final_norm(model.forward(hidden, batch, self.pool, done, model.config.num_layers))
        logits = model.kernels.linear(final, model.head).float().cpu()
        sequence = torch.from_numpy(np.repeat(numbers + self.first, num)).int()
        about = {"lse": logits.logsumexp(-1), "argmax": logits.argmax(-1).int(), "sequence": sequence}
        return {**found, "final": _half(final), **about, "logits": logits}

    def _pick(self, logits: Tensor, numbers: Ints) -> Ints:  # [n, vocab]
        """Gumbel's trick; greedy sequences take the largest logit."""
        temperature = self.temperature[numbers]
        sampled = temperature > 0
        noise = torch.empty(int(sampled.sum()), logits.shape[1]).exponential_(generator=self.draw).log_()
        logits[sampled] = logits[sampled] / temperature[sampled, None] - noise
        chosen: Ints = logits.argmax(-1).numpy()
        return chosen


def _half(hidden: Tensor) -> Tensor:
    return hidden.float().clamp(-65504, 65504).half().cpu()

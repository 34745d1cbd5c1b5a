"""Runs prompts through an engine with early exits and counts what happened. Knows token ids, no text."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verdraft.model.exit_head import Exits
from verdraft.model.transformer import Transformer
from verdraft.scheduler.batches import ragged_batch
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Mode, Request
from verdraft.spec.exit_costs import ExitCosts
from verdraft.spec.spending import FREE, CostTable

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to decode. Windows are filled to the end whether that pays or not, unless `costs` are known."""

    name: str
    mode: Mode
    window: int = 4  # N_i
    round_len: int = 2  # N_d
    confidence: float = 0.0
    costs: tuple[CostTable, ExitCosts] = (FREE, ExitCosts())


@dataclass(slots=True)
class Result:
    """Sums over the decoding of some prompts; prefill is not in it."""

    outputs: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    target_passes: int = 0  # of single sequences
    passes: Counter[int] = field(default_factory=Counter)  # of the engine, by first layer of the segment

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def acceptance(self) -> float:
        """Share of the window tokens that the full model kept."""
        return self.accepted / max(1, self.drafted)

    def add(self, other: "Result") -> None:
        """Sum up."""
        self.outputs += other.outputs
        self.passes += other.passes
        for name in ("seconds", "tokens", "drafted", "accepted", "target_passes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Counted:
    """A model that counts passes by their first layer."""

    model: Transformer
    passes: Counter[int] = field(default_factory=Counter)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, hidden: Tensor, batch: Any, pool: Any, first: int, last: int) -> Tensor:
        self.passes[first] += 1
        return self.model.forward(hidden, batch, pool, first, last)


@dataclass(frozen=True, slots=True)
class Bench:
    """A model, its exits and how long answers are; temperature 0 unless told otherwise."""

    model: Transformer
    exits: Exits
    max_tokens: int
    temperature: float = 0.0

    def measured(self) -> tuple[CostTable, ExitCosts]:
        """What a pass, the segments and the heads cost here."""
        engine = Engine(self.model, EngineConfig(max_model_len=512, num_blocks=32), exits=self.exits)
        engine.measure()
        return engine.drafting.costs, engine.drafting.exits.costs

    def turns(self, settings: Sequence[Setting], prompts: Sequence[Sequence[int]], batch: int) -> dict[str, Result]:
        """All settings on every group of `batch` prompts in turn. Raises when two differ about a token."""
        results = {setting.name: Result() for setting in settings}
        for start in range(0, len(prompts), batch):
            group = prompts[start : start + batch]
            found = {setting.name: self.run(setting, group) for setting in settings}
            if any(result.outputs != found[settings[0].name].outputs for result in found.values()):
                raise RuntimeError(f"two settings disagree about a token of the prompts from {start} on")
            for name, result in found.items():
                results[name].add(result)
        return results

    def run(self, setting: Setting, prompts: Sequence[Sequence[int]]) -> Result:
        """All prompts together, from the first step in which all of them decode."""
        model = Counted(self.model)
        engine = self._engine(setting, model, prompts)
        outputs: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        for i, prompt in enumerate(prompts):
            engine.add(self._request(i, prompt, setting.mode))
        while engine.scheduler.waiting or any(not seq.decoding for seq in engine.scheduler.running):
            _step(engine, outputs)
        before, prefilled = engine.counters(), sum(map(len, outputs.values()))
        model.passes.clear()
        start = time.perf_counter()
        while engine.has_work:
            _step(engine, outputs)
        seconds, after = time.perf_counter() - start, engine.counters()
        old, new = before.spec["early_exit"], after.spec["early_exit"]
        return Result(
            outputs=list(outputs.values()),
            seconds=seconds,
            tokens=sum(map(len, outputs.values())) - prefilled,
            drafted=new.num_draft_tokens - old.num_draft_tokens,
            accepted=new.num_accepted_tokens - old.num_accepted_tokens,
            target_passes=after.target_passes - before.target_passes,
            passes=model.passes,
        )

    def _engine(self, setting: Setting, model: Counted, prompts: Sequence[Sequence[int]]) -> Engine:
        longest = max(map(len, prompts)) + self.max_tokens
        config = EngineConfig(
            max_model_len=longest,
            num_blocks=len(prompts) * -(-(longest + setting.window) // BLOCK),
            block_size=BLOCK,
            max_num_seqs=len(prompts),
            exit_window=setting.window,
            exit_round=setting.round_len,
            exit_confidence=setting.confidence,
        )
        engine = Engine(model, config, exits=self.exits)  # type: ignore[arg-type]
        engine.drafting.costs, engine.drafting.exits.costs = setting.costs
        return engine

    def _request(self, number: int, prompt: Sequence[int], mode: Mode) -> Request:
        params = SamplingParams(max_tokens=self.max_tokens, ignore_eos=True, temperature=self.temperature, seed=number)
        return Request(id=str(number), prompt=prompt, params=params, speculation=mode)

    @torch.inference_mode()
    def agreement(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[int, int, int]:
        """At how many tokens of a greedy answer each exit's first choice is the target's; and of how many."""
        model, tokens = self.model, [*prompt, *answer[:-1]]
        blocks = -(-len(tokens) // BLOCK)
        pool = model.new_pool(blocks, BLOCK)
        batch = ragged_batch(np.array([len(tokens)]), np.array([0]), np.arange(blocks)[None], BLOCK, model.device)
        hidden = model.embed(torch.tensor(tokens, device=model.device), batch.positions)
        first, right = 0, []
        for head in self.exits.heads:
            hidden = model.forward(hidden, batch, pool, first, head.layer)
            chosen = head.token_ids[head.logits(hidden[-len(answer) :]).argmax(1).cpu().numpy()]
            right.append(int((chosen == np.array(answer)).sum()))
            first = head.layer
        return right[0], right[1], len(answer)


def _step(engine: Engine, outputs: dict[str, list[int]]) -> None:
    for request, piece in engine.step():
        outputs[request.id] += piece.tokens
        assert piece.finish != "error", request.id

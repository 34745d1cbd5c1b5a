"""Runs prompts through an engine with early exits and counts what happened. Knows token ids, no text."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
from verdraft.spec.spending import FREE, CostTable, Reading

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Measured:
    """What passes, segments, heads and long contexts cost on a machine; by default nothing."""

    full: CostTable = FREE
    exits: ExitCosts = field(default_factory=ExitCosts)
    reading: Reading = field(default_factory=Reading)


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to decode. Windows are filled to the end whether that pays or not, unless `costs` are known."""

    name: str
    mode: Mode
    window: int = 4  # N_i
    round_len: int = 2  # N_d
    confidence: float = 0.0
    costs: Measured = field(default_factory=Measured)


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
class SharedPool:
    """A model whose engines all get the same KV memory: only one of them works at a time."""

    model: Transformer
    pool: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def new_pool(self, num_blocks: int, block_size: int) -> Any:
        if self.pool is None:
            self.pool = self.model.new_pool(num_blocks, block_size)
        return self.pool


@dataclass(slots=True)
class Counted:
    """A model that counts passes over the segments that begin at some layers."""

    model: SharedPool
    firsts: Sequence[int]
    passes: Counter[int] = field(default_factory=Counter)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, hidden: Tensor, batch: Any, pool: Any, first: int, last: int) -> Tensor:
        self.passes.update(layer for layer in self.firsts if first <= layer < last)
        passed: Tensor = self.model.forward(hidden, batch, pool, first, last)
        return passed


@dataclass(frozen=True, slots=True)
class _Arm:
    """One setting's engine, and the model in it that counts."""

    engine: Engine
    model: Counted
    mode: Mode


@dataclass(frozen=True, slots=True)
class Bench:
    """A model, its exits and how long answers are; temperature 0 unless told otherwise."""

    model: Transformer
    exits: Exits
    max_tokens: int
    temperature: float = 0.0

    def measured(self) -> Measured:
        """As a server measures it when it starts."""
        engine = Engine(self.model, EngineConfig(max_model_len=1024, num_blocks=64), exits=self.exits)
        engine.measure()
        return Measured(engine.drafting.costs, engine.drafting.exits.costs, engine.drafting.reading)

    def turns(self, settings: Sequence[Setting], prompts: Sequence[Sequence[int]], batch: int) -> dict[str, Result]:
        """All settings on every group of `batch` prompts in turn, each by an engine that keeps what it learns. Raises
        when two differ about a token."""
        results = {setting.name: Result() for setting in settings}
        shared, longest = SharedPool(self.model), max(map(len, prompts)) + self.max_tokens
        num_blocks = batch * -(-(longest + max(setting.window for setting in settings)) // BLOCK)
        config = EngineConfig(max_model_len=longest, num_blocks=num_blocks, block_size=BLOCK, max_num_seqs=batch)
        firsts = self.exits.bounds(self.model.config.num_layers)[:-1]
        arms = {setting.name: self._arm(setting, Counted(shared, firsts), config) for setting in settings}
        for start in range(0, len(prompts), batch):
            group = prompts[start : start + batch]
            found = {setting.name: self._run(arms[setting.name], group) for setting in settings}
            if any(result.outputs != found[settings[0].name].outputs for result in found.values()):
                raise RuntimeError(f"two settings disagree about a token of the prompts from {start} on")
            for name, result in found.items():
                results[name].add(result)
        return results

    def run(self, setting: Setting, prompts: Sequence[Sequence[int]]) -> Result:
        """All prompts together, from the first step in which all of them decode."""
        return self.turns([setting], prompts, len(prompts))[setting.name]

    def _run(self, arm: _Arm, prompts: Sequence[Sequence[int]]) -> Result:
        engine = arm.engine
        engine.scheduler.pool.clear_cache()  # its blocks were written over by the other settings
        outputs: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        for i, prompt in enumerate(prompts):
            engine.add(self._request(i, prompt, arm.mode))
        while engine.scheduler.waiting or any(not seq.decoding for seq in engine.scheduler.running):
            _step(engine, outputs)
        before, prefilled = engine.counters(), sum(map(len, outputs.values()))
        arm.model.passes.clear()
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
            passes=Counter(arm.model.passes),
        )

    def _arm(self, setting: Setting, model: Counted, config: EngineConfig) -> _Arm:
        config = replace(
            config,
            exit_window=setting.window,
            exit_round=setting.round_len,
            exit_confidence=setting.confidence,
        )
        engine = Engine(model, config, exits=self.exits)  # type: ignore[arg-type]
        drafting, costs = engine.drafting, setting.costs
        drafting.costs, drafting.exits.costs, drafting.reading = costs.full, costs.exits, costs.reading
        return _Arm(engine, model, setting.mode)

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

"""`verdraft train exits`: collect, choose where the exits sit, distil, validate, write. Knows prompts as ids only."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import Tensor

from verdraft.model.exit_file import TrainedHead, head_rows, save_exits
from verdraft.model.exit_head import TokenIds, check_layers
from verdraft.model.transformer import Transformer
from verdraft.train.collect import Collection, load_shards
from verdraft.train.distil import Recipe, Target, distil, frequent_tokens, judge
from verdraft.train.prompts import TrainingPrompt, trained_on, validated_on
from verdraft.train.shards import Shards
from verdraft.train.sweep import Candidates, sweep, table
from verdraft.train.validate import validate

Rows = Mapping[str, Tensor]
Say = Callable[[str], None]
COLUMNS = ("next", "own", "argmax", "sequence", "lse", "final")  # that are read of shards, beside layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitJob:
    """What the command was asked for."""

    out: Path
    candidates: Candidates
    collection: Collection
    recipe: Recipe
    tokens: int  # of the model's own, to collect
    progress: bool = True


@dataclass(frozen=True, slots=True)
class ExitTrainer:
    """One run over one model; `path` is the folder that `model` was loaded from."""

    model: Transformer
    path: Path
    job: ExitJob
    say: Say = print

    def run(self, prompts: Sequence[TrainingPrompt]) -> None:
        """Write trained heads into the job's folder. Raises DataError and ModelError."""
        for pair in self.job.candidates.pairs():
            check_layers(pair, self.model.config.num_layers)
        learn, held = trained_on(prompts), validated_on(prompts)
        job = self.job
        shards = Shards.claim(job.out, self.model, self.path, [*learn, *held], job.collection, job.progress)
        columns = (*COLUMNS, *(f"layer.{layer}" for layer in job.candidates.layers))  # shards may keep many more
        rows = load_shards(shards.collect("train", learn, job.tokens), columns)
        held_rows = load_shards(shards.collect("held", held, None), columns)
        self._train(rows, held_rows, Counter(p.source for p in learn[: _used(rows)]), [p.source for p in held])

    # ---- training

    def _train(self, rows: Rows, held: Rows, used: Mapping[str, int], sources: Sequence[str]) -> None:
        choice, recipe = self._choose(rows, held), self.job.recipe
        target = self.target_of(rows, choice.vocabularies[0])
        recipe = replace(recipe, inner=choice.inners[0])
        heads, judged = [], []
        for layer in choice.layers:
            adapter = distil(rows, layer, target, recipe, self.job.progress)
            heads.append(TrainedHead(layer, target.token_ids, adapter.weights()))
            judged.append(judge(adapter, held, layer, target, target.token_ids))
        figures = validate(held, sources, target.token_ids, judged[0], judged[1])
        self.say(json.dumps(figures, indent=2))
        record = {
            "collection": {**asdict(self.job.collection), "rows": len(rows["next"]), "own": int(rows["own"].sum())},
            "prompts": dict(used),
            "recipe": asdict(recipe),
            "held_out": figures,
        }
        save_exits(self.job.out, self.path, (heads[0], heads[1]), record)

    def _choose(self, rows: Rows, held: Rows) -> Candidates:
        candidates = self.job.candidates
        if candidates.decided:
            return candidates
        choices = sweep(
            self.model,
            self.path,
            rows,
            held,
            lambda size: self.target_of(rows, size),
            candidates,
            self.job.recipe,
            self.job.progress,
        )
        self.say(table(choices))
        return Candidates(choices[0].layers, (choices[0].vocabulary,), (choices[0].inner,))

    def target_of(self, rows: Rows, size: int) -> Target:
        """The target over its `size` most frequent tokens."""
        token_ids: TokenIds = frequent_tokens(rows, self.model.config.vocab_size, size)
        matrix = head_rows(self.model, self.path, token_ids).float()
        return Target(token_ids, matrix.clone(), self.model.config.norm_eps)


def _used(rows: Rows) -> int:
    return int(rows["sequence"].max()) + 1

"""`verdraft train eagle`: collect, train an EAGLE3 head, judge it, write it. Knows prompts as ids only."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from verdraft.model.eagle import EagleConfig, default_aux_layers
from verdraft.model.eagle_file import save_eagle
from verdraft.model.errors import ModelError
from verdraft.model.exit_file import head_rows
from verdraft.model.transformer import Transformer
from verdraft.train.collect import Collection, load_shards
from verdraft.train.distil import Target, frequent_tokens
from verdraft.train.eagle_fit import EagleRecipe, fit
from verdraft.train.eagle_judge import judge
from verdraft.train.eagle_net import EagleNet
from verdraft.train.eagle_rows import Rows, load_rows
from verdraft.train.prompts import TrainingPrompt, trained_on, validated_on
from verdraft.train.shards import Shards

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleJob:
    """What the command was asked for."""

    out: Path
    recipe: EagleRecipe
    vocabulary: int  # tokens that can be drafted
    tokens: int  # of the model's own, to collect
    max_tokens: int = 192  # of a continuation
    shard_prompts: int = 64  # continued together
    progress: bool = True


@dataclass(frozen=True, slots=True)
class EagleTrainer:
    """One run over one model; `path` is the folder that `model` was loaded from."""

    model: Transformer
    path: Path
    job: EagleJob
    say: Say = print

    def run(self, prompts: Sequence[TrainingPrompt]) -> None:
        """Write a trained head into the job's folder. Raises DataError and ModelError."""
        config, job = self.config(), self.job
        plan = Collection(config.aux_layers, job.max_tokens, job.recipe.seed, job.shard_prompts)
        learn, held = trained_on(prompts), validated_on(prompts)
        shards = Shards.claim(job.out, self.model, self.path, [*learn, *held], plan, job.progress)
        files, held_files = shards.collect("train", learn, job.tokens), shards.collect("held", held, None)
        target = self.target_of(files)
        rows = load_rows(files, config.aux_layers, target)
        net = EagleNet(config, self.model.embedding.float().clone(), target.rows).to(self.model.device)
        fit(net, rows, job.recipe, job.out / "eagle-training.pt", job.progress)
        figures = judge(net, load_rows(held_files, config.aux_layers, target), [p.source for p in held])
        self.say(json.dumps(figures, indent=2))
        used = Counter(p.source for p in learn[: int(rows.numbers.max()) + 1])
        self._save(net, target, {**_collected(plan, rows, used), "recipe": asdict(job.recipe), "held_out": figures})

    def config(self) -> EagleConfig:
        """A layer of the target's own size but for its MLP. Every head has keys and values of its own: the attention
        to its own row is how a token gets in. Raises ModelError for a target without three layers to read."""
        target, layers = self.model.config, default_aux_layers(self.model.config.num_layers)
        if not 0 < layers[0] < layers[1] < layers[2]:
            raise ModelError(f"{self.path}: EAGLE3 needs a model of at least 7 layers, got {target.num_layers}")
        return EagleConfig(
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            aux_layers=layers,
            intermediate_size=self.job.recipe.inner,
            num_heads=target.num_heads,
            num_kv_heads=target.num_heads,
            head_dim=target.head_dim,
            norm_eps=target.norm_eps,
            rope_theta=target.rope_theta,
            fc_norm=True,
            norm_output=True,
        )

    def target_of(self, files: Sequence[Path]) -> Target:
        """The target over the tokens that it writes most."""
        said = load_shards(files, ("next", "own", "argmax", "sequence"))
        token_ids = frequent_tokens(said, self.model.config.vocab_size, self.job.vocabulary)
        matrix = head_rows(self.model, self.path, token_ids).float()
        return Target(token_ids, matrix.clone(), self.model.config.norm_eps)

    def _save(self, net: EagleNet, target: Target, record: Mapping[str, object]) -> None:
        tensors: dict[str, Tensor] = {name: tensor.detach().cpu() for name, tensor in net.state_dict().items()}
        size = self.model.config.vocab_size
        save_eagle(self.job.out, self.path, net.config, tensors, target.token_ids, size, record)


def _collected(plan: Collection, rows: Rows, used: Mapping[str, int]) -> dict[str, object]:
    return {
        "collection": {**asdict(plan), "rows": len(rows.next), "own": int(rows.own.sum())},
        "prompts": dict(used),
    }

"""Where a training command keeps what it collected: a folder of shards that belong to one model, data and plan."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tqdm import tqdm

from verdraft.model.transformer import Transformer
from verdraft.model.weights import fingerprint
from verdraft.train.collect import Collection, collect_shard, write_shard
from verdraft.train.prompts import DataError, TrainingPrompt


@dataclass(frozen=True, slots=True)
class Shards:
    """Made by `claim`."""

    model: Transformer
    folder: Path
    plan: Collection
    progress: bool

    @classmethod
    def claim(
        cls,
        folder: Path,
        model: Transformer,
        path: Path,
        prompts: Sequence[TrainingPrompt],
        plan: Collection,
        progress: bool = True,
    ) -> "Shards":
        """Shards of another model, other prompts or settings are not mixed in: DataError. `path` is the folder of the
        model. If the folder's shards keep the streams behind more layers than the plan asks for, all do."""
        digest = hashlib.sha256(repr([p.ids for p in prompts]).encode()).hexdigest()
        about = {"model": fingerprint(path), "prompts": digest, "plan": asdict(plan)}
        file = folder / "collection.json"
        folder.mkdir(parents=True, exist_ok=True)
        if file.is_file():
            layers = _kept_layers(file, plan.layers)
            plan = replace(plan, layers=layers)
            about["plan"] = asdict(plan)
        claim = json.dumps(about, indent=2)
        if file.is_file() and file.read_text(encoding="utf-8") != claim:
            raise DataError(f"{file}: shards of another model, other data or other settings; name another --out")
        file.write_text(claim, encoding="utf-8")
        return cls(model, folder, plan, progress)

    def collect(self, name: str, prompts: Sequence[TrainingPrompt], tokens: int | None) -> list[Path]:
        """Enough shards for `tokens` tokens of the model's own; None: of all prompts. Those that are there stay, the
        others are made."""
        found, written = list[Path](), 0
        starts = range(0, len(prompts), self.plan.shard_prompts)
        with tqdm(total=tokens, desc=f"collecting {name}", unit=" tokens", disable=not self.progress) as bar:
            for number, start in enumerate(starts):
                file = self.folder / f"{name}-{number:04d}.safetensors"
                if not file.is_file():
                    part = [p.ids for p in prompts[start : start + self.plan.shard_prompts]]
                    write_shard(file, collect_shard(self.model, part, start, self.plan))
                found.append(file)
                written += (more := _num_own(file))
                bar.update(more)
                if tokens is not None and written >= tokens:
                    break
        return found


def _kept_layers(file: Path, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Those of the folder, if they hold all that are wanted."""
    try:
        kept = tuple(json.loads(file.read_text(encoding="utf-8"))["plan"]["layers"])
    except (ValueError, KeyError, TypeError):
        return wanted
    return kept if set(wanted) <= set(kept) else wanted


def _num_own(file: Path) -> int:
    with safe_open(str(file), framework="pt") as shard:
        own: Any = shard.get_tensor("own")
    return int(torch.count_nonzero(own))

"""`verdraft train ...`: flags and data become a job of train/. What is heavy is imported when it runs."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verdraft.server.settings import SettingsError


def add_train_commands(commands: Any) -> None:
    """The sub-commands of `verdraft train`, under the subparsers `commands`."""
    train = commands.add_parser("train", help="train what drafts for a model", allow_abbrev=False)
    kinds = train.add_subparsers(required=True, metavar="KIND")
    exits = kinds.add_parser("exits", help="exit heads, for drafting from early layers", allow_abbrev=False)
    exits.add_argument("model", nargs="?", help="folder, hub id or .gguf file; the demo model when left out")
    exits.add_argument("--data", type=Path, required=True, help="folder of conversations (*.jsonl) and texts (*.txt)")
    exits.add_argument("--out", type=Path, required=True, help="folder for the heads; what is collected stays there")
    lists = "several, with commas, are compared and the best is trained"
    exits.add_argument("--layers", type=_ints, required=True, help=f"L_d,L_i; {lists}")
    exits.add_argument("--vocabulary", type=_ints, default=(2048,), help=f"tokens that can be drafted; {lists}")
    exits.add_argument("--inner", type=_ints, default=(512,), help=f"width of a head's MLP; {lists}")
    exits.add_argument("--tokens", type=_at_least_one, default=300_000, help="of the model's own, to learn from")
    exits.add_argument("--epochs", type=_at_least_one, default=4, help="passes over them")
    exits.add_argument("--seed", type=int, default=0, help="of sampling, data order and first weights")
    exits.add_argument("--threads", type=_at_least_one, help="CPU threads; default: one a core")
    exits.set_defaults(command=train_exits)
    _add_eagle(kinds.add_parser("eagle", help="an EAGLE3 head, a drafter of one layer", allow_abbrev=False))
    _add_predictor(kinds.add_parser("predictor", help="what suffix drafts pay, for the router", allow_abbrev=False))
    _add_suffix(kinds.add_parser("suffix", help="recorded answers for --suffix-cache", allow_abbrev=False))


def _add_eagle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="folder, hub id or .gguf file; the demo model when left out")
    parser.add_argument("--data", type=Path, required=True, help="folder of conversations (*.jsonl) and texts (*.txt)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the head; what is collected stays there")
    parser.add_argument("--vocabulary", type=_at_least_one, default=8192, help="tokens that can be drafted")
    parser.add_argument("--inner", type=_at_least_one, default=768, help="width of the layer's MLP")
    parser.add_argument("--tokens", type=_at_least_one, default=300_000, help="of the model's own, to learn from")
    parser.add_argument("--epochs", type=_at_least_one, default=4, help="passes over them")
    parser.add_argument("--unroll", type=_at_least_one, default=3, help="steps that a draft takes in training")
    parser.add_argument("--seed", type=int, default=0, help="of sampling, data order and first weights")
    parser.add_argument("--threads", type=_at_least_one, help="CPU threads; default: one a core")
    parser.set_defaults(command=train_eagle)


def _add_predictor(parser: argparse.ArgumentParser) -> None:
    """The defaults of training are the paper's (HVD)."""
    parser.add_argument("model", nargs="?", help="whose tokenizer and template: as for exits")
    parser.add_argument("--data", type=Path, required=True, help="folder of recorded answers (*.jsonl, *.safetensors)")
    parser.add_argument("--out", type=Path, required=True, help="the predictor's file; its calibration beside it, .svg")
    parser.add_argument("--without", type=_names, default=(), help="files or workloads to leave out, with commas")
    parser.add_argument("--longest", type=_at_least_one, default=8192, help="tokens of prompt and answer together")
    parser.add_argument("--draft-len", type=_at_least_one, default=64, help="tokens of the longest suffix draft")
    parser.add_argument("--epochs", type=_at_least_one, default=20, help="passes over the states")
    parser.add_argument("--batch", type=_at_least_one, default=65_536, help="states in one step")
    parser.add_argument("--lr", type=_positive, default=1e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=42, help="of first weights and order")
    parser.add_argument("--threads", type=_at_least_one, help="CPU threads; default: one a core")
    parser.set_defaults(command=train_predictor)


def _add_suffix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="whose tokenizer and template: as for exits")
    parser.add_argument("--data", type=Path, required=True, help="folder of recorded answers (*.jsonl, *.safetensors)")
    parser.add_argument("--out", type=Path, required=True, help="the file")
    parser.add_argument("--without", type=_names, default=(), help="files or workloads to leave out, with commas")
    parser.add_argument("--longest", type=_at_least_one, default=8192, help="tokens of prompt and answer together")
    parser.set_defaults(command=train_suffix)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def _ints(text: str) -> tuple[int, ...]:
    return tuple(sorted({_at_least_one(part) for part in text.split(",")}))


def _at_least_one(text: str) -> int:
    if not text.strip().isascii() or not text.strip().isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def train_exits(arguments: argparse.Namespace) -> None:
    """Raises SettingsError for whatever the user can put right: a flag, the model, the data."""
    if len(arguments.layers) < 2:
        raise SettingsError("--layers: expected at least two layers, such as 4,8")
    _with_clear_errors(lambda given: _train_drafter(given, _exit_trainer), arguments)


def train_eagle(arguments: argparse.Namespace) -> None:
    """Raises SettingsError for whatever the user can put right: a flag, the model, the data."""
    _with_clear_errors(lambda given: _train_drafter(given, _eagle_trainer), arguments)


def train_predictor(arguments: argparse.Namespace) -> None:
    """Raises SettingsError for whatever the user can put right: a flag, the model, the data."""
    _with_clear_errors(_train_predictor, arguments)


def train_suffix(arguments: argparse.Namespace) -> None:
    """Raises SettingsError for whatever the user can put right: a flag, the model, the data."""
    _with_clear_errors(_train_suffix, arguments)


def _train_suffix(arguments: argparse.Namespace) -> None:
    from verdraft.server.train_suffix import run

    run(arguments)


def _with_clear_errors(job: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> None:
    from verdraft.bench.prompts import DataError as BenchDataError
    from verdraft.kernels.base import KernelUnavailable
    from verdraft.model.errors import ModelError
    from verdraft.train.prompts import DataError

    try:
        job(arguments)
    except (DataError, BenchDataError, ModelError, KernelUnavailable) as error:
        raise SettingsError(str(error)) from error


def _train_predictor(arguments: argparse.Namespace) -> None:
    import torch

    from verdraft.server.train_predictor import run

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    run(arguments)


def _train_drafter(arguments: argparse.Namespace, trainer: Callable[[Any, Path, argparse.Namespace], Any]) -> None:
    """Run what `trainer` makes for a model, its folder and the flags on the data's prompts."""
    import torch

    from verdraft.model.config import read_config
    from verdraft.model.source import resolve_model
    from verdraft.server.build import build_text
    from verdraft.server.train_data import read_prompts

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    path = resolve_model(arguments.model)
    text = build_text(path, read_config(path).eos_token_ids)
    prompts = read_prompts(arguments.data, text, arguments.seed)
    trainer(_load(path), path, arguments).run(prompts)


def _load(path: Path) -> Any:
    import torch

    from verdraft.kernels.chooser import choose_kernels
    from verdraft.model.load import load_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return load_model(path, choose_kernels("auto", device, dtype, "auto"), dtype, device)


def _exit_trainer(model: Any, path: Path, arguments: argparse.Namespace) -> Any:
    from verdraft.train.collect import Collection
    from verdraft.train.distil import Recipe
    from verdraft.train.exits import ExitJob, ExitTrainer
    from verdraft.train.sweep import Candidates

    job = ExitJob(
        out=arguments.out,
        candidates=Candidates(arguments.layers, arguments.vocabulary, arguments.inner),
        collection=Collection(layers=arguments.layers, seed=arguments.seed),
        recipe=Recipe(epochs=arguments.epochs, seed=arguments.seed, inner=arguments.inner[0]),
        tokens=arguments.tokens,
    )
    return ExitTrainer(model, path, job)


def _eagle_trainer(model: Any, path: Path, arguments: argparse.Namespace) -> Any:
    from verdraft.train.eagle import EagleJob, EagleTrainer
    from verdraft.train.eagle_fit import EagleRecipe

    recipe = EagleRecipe(inner=arguments.inner, unroll=arguments.unroll, epochs=arguments.epochs, seed=arguments.seed)
    job = EagleJob(out=arguments.out, recipe=recipe, vocabulary=arguments.vocabulary, tokens=arguments.tokens)
    return EagleTrainer(model, path, job)

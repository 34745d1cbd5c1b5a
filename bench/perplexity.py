"""`python -m verdraft.bench.perplexity [MODEL] --data FILE`: what quantisation costs, as perplexity of a text.

The text's first tokens are cut into windows, and the engine scores every token of a window but its first.
"""

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
from tokenizers import Tokenizer
from torch import Tensor

from verdraft.kernels.base import Kernels
from verdraft.kernels.blocks import Activations, Quantization
from verdraft.kernels.chooser import choose_kernels
from verdraft.kernels.cpu import CpuKernels
from verdraft.kernels.float8 import round_to_float8
from verdraft.model.load import load_model
from verdraft.model.source import resolve_model
from verdraft.model.transformer import Transformer
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Request

CPU = torch.device("cpu")
BLOCK = 16


class Float8Kernels(CpuKernels):
    """The weights that `--quantization fp8` has on a GPU, in float32."""

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        return super().pack(round_to_float8(weight).expand(), bias)


@dataclass(frozen=True, slots=True)
class Scores:
    """Natural-log probabilities of a text's tokens, and the seconds that they took."""

    logprobs: Sequence[float]
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(-math.fsum(self.logprobs) / len(self.logprobs))


def main() -> None:
    parser = argparse.ArgumentParser(prog="verdraft.bench.perplexity", description=__doc__)
    parser.add_argument("model", nargs="?", help="folder, hub id or .gguf file; default: the demo model")
    parser.add_argument("--data", type=Path, required=True, help="text file")
    parser.add_argument("--quantization", nargs="+", choices=get_args(Quantization), default=["none", "int8", "int4"])
    parser.add_argument("--activations", nargs="+", choices=get_args(Activations), default=["float"])
    parser.add_argument("--tokens", type=int, default=8192, help="how much of the text")
    parser.add_argument("--window", type=int, default=1024, help="tokens that see each other")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path = resolve_model(args.model)
    tokens = read_tokens(path, args.data, args.tokens)
    windows = [tokens[i : i + args.window] for i in range(0, len(tokens) - 1, args.window)]
    print(f"{path.name}, {args.data.name}: {len(tokens)} tokens in windows of {args.window}")
    print(
        f"{'quantization':12} {'activations':12} {'perplexity':>10} {'largest change of a logprob':>28} {'seconds':>8}"
    )
    first: Scores | None = None
    for quantization, activations in product(args.quantization, args.activations):
        scores = score(path, quantization, windows, activations)
        first = first or scores
        change = max(abs(a - b) for a, b in zip(scores.logprobs, first.logprobs, strict=True))
        form = f"{quantization:12} {activations:12}"
        print(f"{form} {scores.perplexity:10.4f} {change:28.6f} {scores.seconds:8.1f}", flush=True)


def read_tokens(model: Path, text: Path, limit: int) -> list[int]:
    """The first `limit` tokens of a text, without special ones."""
    tokenizer: Tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    excerpt = text.read_text(encoding="utf-8")[: limit * 32]  # hardly any text has 32 characters a token
    ids: list[int] = tokenizer.encode(excerpt, add_special_tokens=False).ids
    return ids[:limit]


def score(
    path: Path, quantization: Quantization, windows: Sequence[Sequence[int]], activations: Activations = "float"
) -> Scores:
    """Load the model with these weights and inputs and score the windows, one after the other."""
    model = load_model(path, _kernels(quantization, activations), torch.float32, CPU)
    engine = engine_for(model, max(map(len, windows)))
    start = time.perf_counter()
    logprobs = [logprob for i, window in enumerate(windows) for logprob in _score_window(engine, str(i), window)]
    return Scores(logprobs, time.perf_counter() - start)


def _kernels(quantization: Quantization, activations: Activations) -> Kernels:
    if quantization == "fp8":
        return Float8Kernels(activations=activations)
    return choose_kernels("cpu", CPU, torch.float32, quantization, activations=activations)


def engine_for(model: Transformer, window: int) -> Engine:
    """An engine for one window at a time; a prompt leaves room for one more token."""
    config = EngineConfig(max_model_len=window + 1, num_blocks=window // BLOCK + 2, block_size=BLOCK)
    return Engine(model, config)


def _score_window(engine: Engine, id: str, window: Sequence[int]) -> list[float]:
    engine.add(Request(id=id, prompt=window, params=SamplingParams(max_tokens=0, prompt_logprobs=0)))
    scored: list[float] = []
    while engine.has_work:
        for _, piece in engine.step():
            scored += [token.logprob for token in piece.prompt_logprobs]
    assert len(scored) == len(window) - 1
    return scored


if __name__ == "__main__":
    main()

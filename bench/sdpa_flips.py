"""How often a token flips when attention is torch's SDPA, whose bits change with the query length.

Every prompt is decoded one token at a time, then again with its own answer as the prediction, so that verification
runs many queries at once. Exact kernels give equal ids; for the others the first difference and its top-2 margin count.

    python -m verdraft.bench.sdpa_flips MODEL_DIR --data PROMPTS.jsonl [...] --kernels sdpa
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

from verdraft.kernels.base import Kernels
from verdraft.kernels.chooser import choose_kernels
from verdraft.kernels.torch_ref import TorchKernels
from verdraft.model.load import load_model
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.outputs import TokenLogprobs
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Mode, Request


class SdpaKernels(TorchKernels):
    """SDPA for attention, everything else as the exact backend does it: only attention can flip a token."""

    name = "sdpa"

    def __init__(self, exact: Kernels) -> None:
        super().__init__()
        self._exact = exact

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        return self._exact.pack(weight, bias)

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        return self._exact.linear(x, packed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._exact.rms_norm(x, weight, eps)


@dataclass(frozen=True, slots=True)
class Decoded:
    """One answer and what each of its tokens was worth."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]


def decode(engine: Engine, prompt: Sequence[int], max_tokens: int, prediction: Sequence[int]) -> Decoded:
    """Greedy, alone; with a prediction, through long drafts."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2)
    mode: Mode = "auto" if prediction else "off"
    engine.add(Request(id="0", prompt=prompt, params=params, speculation=mode, prediction=tuple(prediction)))
    found = Decoded([], [])
    while engine.has_work:
        for _, piece in engine.step():
            found.tokens.extend(piece.tokens)
            found.logprobs.extend(piece.logprobs)
    return found


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first differing token, None when the answers are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def margin(score: TokenLogprobs) -> float:
    """Log-probability between the best and the second token."""
    return score.top[0][1] - score.top[1][1]


def build_engine(model_dir: Path, kernels_name: str) -> Engine:
    """An engine of one sequence with a cold cache per prompt (each prompt is different)."""
    cpu = torch.device("cpu")
    kernels = choose_kernels("cpu" if kernels_name == "sdpa" else kernels_name, cpu, torch.float32)
    if kernels_name == "sdpa":
        kernels = SdpaKernels(kernels)
    model = load_model(model_dir, kernels, torch.float32, cpu)
    eos = model.config.eos_token_ids
    return Engine(model, EngineConfig(max_model_len=4096, num_blocks=512, eos_token_ids=eos))


def read_prompts(files: Sequence[Path], limit: int) -> list[list[dict[str, str]]]:
    """The first `limit` conversations of each file."""
    lines = [line for file in files for line in file.read_text().splitlines()[:limit]]
    return [json.loads(line)["messages"] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=10, help="prompts per file")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--kernels", default="sdpa", help="sdpa, or any name that --kernels of the server takes")
    args = parser.parse_args()
    engine = build_engine(args.model_dir, args.kernels)
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model_dir)
    flips, tokens = [], 0
    prompts = read_prompts(args.data, args.limit)
    for messages in tqdm(prompts, unit="prompt"):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        plain = decode(engine, prompt, args.max_tokens, ())
        drafted = decode(engine, prompt, args.max_tokens, plain.tokens)
        tokens += len(plain.tokens)
        where = first_difference(plain.tokens, drafted.tokens)
        if where is not None and where < len(plain.logprobs):
            flips.append(margin(plain.logprobs[where]))
    report = {"kernels": args.kernels, "answers": len(prompts), "tokens": tokens, "answers_that_differ": len(flips)}
    print(json.dumps(report | {"top2_margins": sorted(flips)}))


if __name__ == "__main__":
    main()

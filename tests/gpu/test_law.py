"""The law on the GPU: in deterministic mode, equal token ids whatever drafts, batches, chunks and recordings did.

The fast mode promises no such thing: how many of its answers change is printed, not judged.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from verdraft.bench.gpu_form import recorder
from verdraft.bench.gpu_model import LLAMA_8B, QWEN3_8B, TINY, RandomWeights, random_model
from verdraft.kernels.chooser import choose_kernels
from verdraft.model.cache import models_dir
from verdraft.model.config import ModelConfig
from verdraft.model.eagle import EagleConfig, EagleHead, assemble_eagle, tensor_shapes
from verdraft.model.exit_head import Exits, own_exits
from verdraft.model.load import load_model
from verdraft.model.recordings import eagle_with_recordings, with_recordings
from verdraft.model.transformer import Transformer
from verdraft.scheduler.config import DraftShape, EngineConfig
from verdraft.scheduler.engine import NO_EXITS, DrafterFactory, Engine
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Request
from verdraft.spec.draft import ASK, EMPTY, Draft

MODELS: dict[str, ModelConfig] = {
    "tiny": TINY,
    "llama 8b, 4 layers": replace(LLAMA_8B, num_layers=4, vocab_size=32000),
    "qwen3 8b, 4 layers": replace(QWEN3_8B, num_layers=4, vocab_size=32000),
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.7, "logit_bias": {17: 3.0}, "min_tokens": 20},
]
HEAD = EagleConfig(
    hidden_size=TINY.hidden_size,
    target_hidden_size=TINY.hidden_size,
    aux_layers=(1, 2, 3),
    intermediate_size=TINY.intermediate_size,
    num_heads=TINY.num_heads,
    num_kv_heads=TINY.num_kv_heads,
    head_dim=TINY.head_dim,
    norm_eps=TINY.norm_eps,
)
DEMO = models_dir() / "SmolLM2-135M-Instruct"


@cache
def model_of(name: str, deterministic: bool, device: torch.device) -> Transformer:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernels = choose_kernels("auto", device, dtype, deterministic=deterministic)
    if name == "demo":
        return load_model(DEMO, kernels, dtype, device)
    return random_model(MODELS[name], kernels, dtype, device)


class Trees:
    """Knows an answer and drafts it as a tree: beside every right token stands a wrong one. `most`: tokens at once."""

    def __init__(self, answer: list[int]) -> None:
        self.answer, self.done, self.most = answer, 0, 0

    def start(self, prompt: Sequence[int]) -> None: ...

    def extend(self, tokens: Sequence[int]) -> None:
        self.done, self.most = self.done + len(tokens), max(self.most, len(tokens))

    def clue(self) -> int:
        return ASK

    def propose(self, limit: int) -> Draft:
        right = self.answer[self.done : self.done + min(limit // 2, 5)]
        tokens = [token for pair in ((wanted ^ 1, wanted) for wanted in right) for token in pair]
        parents = [2 * (i // 2) - 1 for i in range(len(tokens))]
        return Draft(tuple(tokens), "eagle", (1.0,) * len(tokens), parents=tuple(parents)) if tokens else EMPTY

    def stop(self) -> None: ...


def answers(
    model: Transformer,
    mode: str,
    chunk: int,
    late: int,
    exits: Exits = NO_EXITS,
    drafters: DrafterFactory | None = None,
    eagle: EagleHead | None = None,
    topk: int = 1,
) -> list[list[int]]:
    """Of the KINDS of requests; every `late` steps another one arrives (0: one after the other)."""
    size = model.kernels.page_size
    config = EngineConfig(
        max_model_len=1024,
        num_blocks=8192 // size,
        block_size=size,
        max_num_seqs=8,
        max_batch_tokens=chunk,
        eagle=DraftShape(depth=4, topk=topk, tokens=8),
    )
    engine, outputs, step = Engine(model, config, drafters, exits, eagle), [[] for _ in KINDS], 0
    phrase = [17, 33, 49, 65, 81, 97, 113]
    pending = [
        Request(
            id=str(i),
            prompt=[*phrase * (2 + 7 * i), 100 + i],
            params=SamplingParams(seed=i, max_tokens=48, ignore_eos=True, **kind),
            speculation=mode,
        )
        for i, kind in enumerate(KINDS)
    ]
    while pending or engine.has_work:
        if pending and (not engine.has_work or (late and step % late == 0)):
            engine.add(pending.pop(0))
        for request, piece in engine.step():
            outputs[int(request.id)].extend(piece.tokens)
            assert piece.finish != "error"
        step += 1
    return outputs


@pytest.fixture(params=[*MODELS, pytest.param("demo", marks=pytest.mark.skipif(not DEMO.is_dir(), reason="no files"))])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "as it is"])
def test_deterministic_mode_keeps_the_law(name: str, recorded: bool, device: torch.device) -> None:
    plain = model_of(name, True, device)
    expected = answers(plain, "off", 1024, 0)
    model = with_recordings(plain, recorder(device)) if recorded else plain
    layers = plain.config.num_layers
    exits = own_exits(model, (layers // 4, layers // 2))
    for mode, chunk, late in [("off", 64, 1), ("suffix", 64, 2), ("suffix", 1024, 0), ("hispec", 128, 2)]:
        assert answers(model, mode, chunk, late, exits) == expected, (mode, chunk, late)


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "as it is"])
def test_accepted_trees_keep_the_law(name: str, recorded: bool, device: torch.device) -> None:
    """Their paths are moved in the pool to where a chain has them."""
    plain = model_of(name, True, device)
    expected, made = answers(plain, "off", 1024, 0), dict[str, Trees]()

    def drafter(request: Request) -> Trees:
        return made.setdefault(request.id, Trees(expected[int(request.id)]))

    model = with_recordings(plain, recorder(device)) if recorded else plain
    assert answers(model, "off", 512, 2, drafters=drafter) == expected
    assert all(trees.most > 3 for trees in made.values())


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "as it is"])
@pytest.mark.parametrize("topk", [1, 3], ids=["chains", "trees"])
def test_an_eagle_head_keeps_the_law(topk: int, recorded: bool, device: torch.device) -> None:
    """One that knows nothing, and a small vocabulary; it drafts on the device, for requests of all kinds."""
    plain = model_of("tiny", True, device)
    weights = RandomWeights(plain.dtype, device, seed=1000)
    tensors = {name: weights.take(name, *shape) for name, shape in tensor_shapes(HEAD, 300).items()}
    head = assemble_eagle(HEAD, tensors, np.arange(100, 400), plain)
    model = with_recordings(plain, recorder(device)) if recorded else plain
    eagle = eagle_with_recordings(head, recorder(device)) if recorded else head
    expected = answers(plain, "off", 1024, 0)
    assert answers(model, "eagle", 128, 2, eagle=eagle, topk=topk) == expected


def test_how_often_the_fast_mode_differs(name: str, device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of(name, False, device)
    expected = answers(model, "off", 1024, 0)
    found = [answers(model, mode, 64, 2) for mode in ("off", "suffix")]
    changed = [sum(a != b for a, b in zip(run, expected, strict=True)) for run in found]
    with capsys.disabled():
        print(f"\n# {name}, {model.kernels.name}: answers of 8 that changed in batches, off and suffix: {changed}")
    assert all(len(answer) == 48 for run in found for answer in run)

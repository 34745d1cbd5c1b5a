"""How near a request's tokens came to being others, where kernels are not exact and the device finds the tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from verdraft.kernels.base import Kernels
from verdraft.kernels.cpu import CpuKernels
from verdraft.kernels.portable import PortableOps
from verdraft.kernels.torch_ref import TorchKernels
from verdraft.model.load import load_model
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.device import Device
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.outputs import Margins
from verdraft.scheduler.request import Request

PROMPT, TOKENS = [5, 6, 7, 8, 9, 10, 11], 24


@pytest.fixture
def answer(
    tiny_llama_path: Path, late_device: Callable[[], Device], make_request: Callable[..., Request], drain: Callable
) -> Callable[..., tuple[list[int], Margins, Engine]]:
    """Tokens and margins of a greedy answer. `twin`: the first token's logit is that of the second, too."""

    def decode(kernels: Kernels, twin: tuple[int, int] | None = None, **fields: object):
        model = load_model(tiny_llama_path, kernels, torch.float32, torch.device("cpu"))
        if twin:
            with torch.inference_mode():
                model.head.weight[twin[0]] = model.head.weight[twin[1]]
        engine = Engine(model, EngineConfig(num_blocks=16, max_model_len=128), device=late_device())
        engine.add(make_request("one", PROMPT, **{"max_tokens": TOKENS, "ignore_eos": True} | fields))
        finished = drain(engine)["one"]
        return finished.tokens, finished.slices[-1].summary.spec.margins, engine

    return decode


def test_exact_kernels_have_none(answer) -> None:
    _, margins, _ = answer(CpuKernels(PortableOps()))
    assert margins == Margins()


@pytest.mark.parametrize("drafted", [False, True])
def test_tokens_of_equal_logits_are_near_ties(answer, drafted: bool) -> None:
    """Those that are committed: a draft goes on behind the end of the answer."""
    tokens, margins, _ = answer(TorchKernels(), max_tokens=TOKENS + 8)
    assert margins.num_known == TOKENS + 8
    assert margins.num_near == 0
    assert margins.least > Margins.NEAR
    token, twin = tokens[3], max(set(range(300)).difference(tokens, PROMPT))
    drafts = {"speculation": "suffix", "prediction": tokens} if drafted else {"speculation": "off"}
    again, margins, engine = answer(TorchKernels(), (twin, token), **drafts)
    assert again == tokens[:TOKENS]
    assert margins == Margins(0.0, TOKENS, again.count(token))
    assert engine.counters().near_ties == again.count(token)
    assert (engine.totals.spec["prediction"].num_accepted_tokens > 8) == drafted


def test_nothing_is_known_where_filters_cut(answer) -> None:
    assert answer(TorchKernels(), temperature=0.8, seed=1, top_p=0.9)[1] == Margins()

"""Where the model is, the host can read nothing but results: all modes run on torch's "meta" device, whose tensors have
no values, so that any look at one fails, and so does any work that a recorded pass could not repeat.

What the host reads is drawn by lot, so these engines draft, accept and reject at random.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from verdraft.bench.gpu_form import Rerunner
from verdraft.bench.gpu_model import TINY
from verdraft.kernels.base import Batch, Kernels
from verdraft.kernels.draws import Draws
from verdraft.kernels.torch_ref import TorchKernels, TorchKV
from verdraft.kernels.torch_sampling import law_tokens
from verdraft.model.eagle import EagleConfig, assemble_eagle, tensor_shapes
from verdraft.model.exit_head import own_exits
from verdraft.model.load import assemble_model
from verdraft.model.recordings import eagle_with_recordings, with_recordings
from verdraft.scheduler.config import DraftShape, EngineConfig
from verdraft.scheduler.device import Computed, Found, pack
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Request

META = torch.device("meta")
VOCAB = TINY.vocab_size
HEAD = EagleConfig(
    hidden_size=128,
    target_hidden_size=128,
    aux_layers=(1, 2, 3),
    intermediate_size=192,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    norm_eps=1e-5,
)


class Weights:
    """Of any model: shapes alone."""

    def take(self, name: str, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)


class NoCopies(TorchDispatchMode):
    """Nothing comes from the host, or goes there, but through the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        out = func(*args, **(kwargs or {}))
        tensors += [out] if isinstance(out, Tensor) else []
        assert all(tensor.device == META for tensor in tensors), f"{func} takes or makes a tensor of the host"
        return out


class Unreadable:
    """A device whose results are drawn by lot."""

    overlaps = True

    def __init__(self) -> None:
        self.lot = np.random.default_rng(0)
        self.sampled: set[tuple[bool, bool]] = set()

    def sampler(
        self, logits: Tensor, draws: Draws, token_ids: Tensor | None = None, margins: Tensor | None = None
    ) -> Tensor:
        """The first time of a kind in full: on this device, its hundreds of small operations take long."""
        kind = (token_ids is None, draws.limits is None)
        if kind not in self.sampled:
            self.sampled.add(kind)
            law_tokens(logits, draws, token_ids, margins)
        return logits.new_empty(logits.shape[0], dtype=torch.int64)

    def put(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        with torch.utils._python_dispatch._disable_current_modes():
            staged, parts = pack(arrays, pinned=False)
            return parts.of(staged.to(META))

    def start(self, work: Callable[[], Computed]) -> Callable[[], Found]:
        computed = work()
        return lambda: computed.found(self.fetch(computed.readable))

    def fetch(self, tensors: Sequence[Tensor]) -> list[np.ndarray]:
        return [self._drawn(tensor) for tensor in tensors]

    def _drawn(self, tensor: Tensor) -> np.ndarray:
        if tensor.dtype == torch.int64:
            return self.lot.integers(3, 8, tuple(tensor.shape))  # so few that drafts are often right
        return self.lot.normal(size=tuple(tensor.shape)).astype(np.float32)


class Still:
    """In place of a Triton kernel, which could not run here."""

    launches = 0

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        assert all(isinstance(size, int) for size in grid)
        return self.launch

    def launch(self, *args: Any, **constants: Any) -> None:
        Still.launches += 1
        assert all(arg.device == META for arg in args if isinstance(arg, Tensor))


class StillKernels(TorchKernels):
    """torch's reference reads its batches."""

    graphs = True

    def attend(self, q: Tensor, layer_kv: TorchKV, batch: Batch, scale: float) -> Tensor:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@pytest.fixture(params=["torch", "triton", "triton exact", "flash-attn 3"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    if request.param == "torch":
        return StillKernels()
    pytest.importorskip("triton")
    from verdraft.kernels import flash, flash_libraries, triton_attention, triton_kernels, triton_linear, triton_ops

    for module in (triton_attention, triton_linear, triton_ops):
        for name in ("_attend", "_linear", "_rms_norm", "_silu_mul", "_rope", "_write", "_move"):
            monkeypatch.setattr(module, name, Still(), raising=False)
    if request.param == "flash-attn 3":
        return flash.FlashKernels(flash_libraries.flash_attn_3(lambda q, *_, **__: torch.empty_like(q)))
    return triton_kernels.TritonKernels(deterministic=request.param == "triton exact")


def requests() -> list[Request]:
    """Of all modes; greedy, seeded, filtered, with penalties and with logprobs."""
    modes = ("off", "suffix", "early_exit", "hispec", "eagle", "hybrid")
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
        {"temperature": 0.0, "min_tokens": 8, "logit_bias": {5: 1.0}, "stop_token_ids": frozenset({9})},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, "prompt_logprobs": 1},
    ]
    return [
        Request(
            id=f"{mode} {i}",
            prompt=[3, 4, 5, 6, 7] * (1 + 5 * i),
            params=SamplingParams(seed=i, max_tokens=12, ignore_eos=True, **kind),
            speculation=mode,
        )
        for number, mode in enumerate(modes)
        for i, kind in enumerate(kinds)
        if (number + i) % 5 < 3 or mode == "hybrid"
    ]


@pytest.mark.parametrize(("topk", "recorded"), [(1, False), (3, True)], ids=["chains", "trees, recorded"])
@torch.inference_mode()
def test_no_mode_looks_at_what_the_device_has(
    kernels: Kernels, topk: int, recorded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, device = assemble_model(TINY, kernels, Weights(), META), Unreadable()
    tensors = {name: Weights().take(name, *shape) for name, shape in tensor_shapes(HEAD, VOCAB).items()}
    eagle = assemble_eagle(HEAD, tensors, np.arange(VOCAB), model)
    served = with_recordings(model, Rerunner()) if recorded else model
    eagle = eagle_with_recordings(eagle, Rerunner()) if recorded else eagle
    shape = DraftShape(depth=4, topk=topk, tokens=8)
    config = EngineConfig(
        max_model_len=256, num_blocks=16, block_size=16, max_num_seqs=8, max_batch_tokens=64, eagle=shape
    )
    engine = Engine(served, config, exits=own_exits(served, (1, 2)), eagle=eagle, device=device)
    for request in requests():
        engine.add(request)
    finishes: list[str] = []
    with NoCopies():
        while engine.has_work:
            finishes += [piece.finish for _, piece in engine.step() if piece.finish]
    assert finishes == ["length"] * len(requests())
    assert not caplog.records, "drafting failed, which the engine forgives"
    drafted = engine.counters().spec
    assert min(drafted[source].num_draft_tokens for source in ("suffix", "early_exit", "eagle")) > 10
    assert sum(stats.num_accepted_tokens for stats in drafted.values()) > 5
    if recorded:
        assert min(len(served.recordings.by_size), len(eagle.recordings.by_size)) > 3

"""Whole tiny models on Triton's kernels, through its interpreter: the logits that torch's give."""

import pytest
import torch

from verdraft.bench.gpu_model import even_batch
from verdraft.kernels.base import Kernels
from verdraft.kernels.torch_ref import TorchKernels
from verdraft.model.load import load_model

pytest.importorskip("triton")
from verdraft.kernels.triton_kernels import TritonKernels

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "OPT"])
@torch.inference_mode()
def test_triton_kernels_compute_a_model(family: str, tiny_model: object) -> None:
    path = tiny_model(family)
    tokens, batch = torch.arange(20, 34), even_batch(2, 7, 7, 4, CPU)

    def logits(kernels: Kernels) -> torch.Tensor:
        model = load_model(path, kernels, torch.float32, CPU)
        hidden = model.embed(tokens, batch.positions)
        return model.logits(model.forward(hidden, batch, model.new_pool(4, 4), 0, model.config.num_layers))

    expected = logits(TorchKernels())
    for kernels in (TritonKernels(), TritonKernels(deterministic=True)):
        torch.testing.assert_close(logits(kernels), expected, rtol=1e-4, atol=1e-4)

"""Random models of known shapes, made on a device and never on a disk: for timings, and for the law on a GPU."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from verdraft.kernels.base import CHAINS, Batch, Kernels
from verdraft.model.config import ModelConfig
from verdraft.model.load import assemble_model
from verdraft.model.transformer import Transformer

QUIET: Final = 0.05  # of what a quiet layer would add

LLAMA_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_model_len=131072,
    eos_token_ids=frozenset(),
    norm_eps=1e-5,
    rope_theta=500000.0,
)
QWEN3_8B = replace(
    LLAMA_8B,
    family="qwen3",
    vocab_size=151936,
    intermediate_size=12288,
    num_layers=36,
    max_model_len=40960,
    norm_eps=1e-6,
    rope_theta=1000000.0,
)
TINY = replace(
    LLAMA_8B,
    vocab_size=512,
    hidden_size=128,
    intermediate_size=192,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    max_model_len=2048,
)


@dataclass(slots=True)
class RandomWeights:
    """Norms near one, everything else so small that the stream keeps its size; another draw for every tensor."""

    dtype: torch.dtype
    device: torch.device
    seed: int = 0

    def take(self, name: str, *shape: int) -> Tensor:
        self.seed += 1
        generator = torch.Generator(self.device).manual_seed(self.seed)
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        if "norm" in name and name.endswith(".weight"):
            return tensor.normal_(1.0, 0.1, generator=generator)
        return tensor.normal_(0.0, shape[-1] ** -0.5, generator=generator)


@dataclass(slots=True)
class AgreeingWeights(RandomWeights):
    """Layers from `quiet` on add little to the stream, so that early exits are often right."""

    quiet: int = 0

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = RandomWeights.take(self, name, *shape)
        adds = re.search(r"\.layers\.(\d+)\..*(o_proj|down_proj)\.weight$", name)
        return tensor.mul_(QUIET) if adds and int(adds[1]) >= self.quiet else tensor


@torch.inference_mode()
def random_model(
    config: ModelConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device, quiet: int | None = None
) -> Transformer:
    """The same one for the same arguments; `quiet`: the layer from which on layers add little."""
    weights = RandomWeights(dtype, device) if quiet is None else AgreeingWeights(dtype, device, quiet=quiet)
    return assemble_model(config, kernels, weights, device)


def even_batch(rows: int, queries: int, context: int, page_size: int, device: torch.device) -> Batch:
    """Rows of the same sizes in scattered pages: `queries` tokens each, at the end of `context`."""
    width = -(-context // page_size)
    pages = torch.randperm(rows * width, generator=torch.Generator().manual_seed(0)).view(rows, width)
    places = torch.arange(context - queries, context)
    slots = pages[:, places // page_size] * page_size + places % page_size
    return Batch(
        cu_q=(torch.arange(rows + 1) * queries).int().to(device),
        seq_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
        pages=pages.int().to(device),
        slots=slots.flatten().to(device),
        positions=places.repeat(rows).to(device),
        max_q=queries,
        max_k=context,
        parents=CHAINS.to(device),
    )


def num_bytes(tensors: Sequence[Tensor]) -> int:
    """What they take together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

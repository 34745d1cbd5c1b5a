"""The flash backend: attention of chains from a flash-attention library, everything else from the Triton backend."""

from collections.abc import Sequence

import torch
from torch import Tensor

from verdraft.kernels.base import Batch, KernelUnavailable
from verdraft.kernels.blocks import Quantization
from verdraft.kernels.flash_libraries import FlashLibrary
from verdraft.kernels.torch_ref import TorchKV
from verdraft.kernels.triton_kernels import TritonKernels


class FlashKernels(TritonKernels):
    """Every operation of `Kernels` in 16-bit types, named after the library. Not exact: the libraries split long
    contexts by what is in the batch, and a tree's tokens are computed by another kernel than a chain's."""

    def __init__(self, library: FlashLibrary, quantization: Quantization = "none") -> None:
        super().__init__(quantization=quantization)
        self._library = library
        self.name, self.graphs = library.name, library.graphs
        self.page_size, self.page_sizes = library.page_size, library.page_sizes

    def pool(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Sequence[TorchKV]:
        if head_dim not in self._library.head_dims:
            raise KernelUnavailable(f"kernels: {self.name} has no kernel for a head_dim of {head_dim}")
        assert not self.page_sizes or page_size in self.page_sizes, f"{self.name}: no pages of {page_size} tokens"
        return super().pool(layers, pages, page_size, kv_heads, head_dim, dtype, device)

    def attend(self, q: Tensor, layer_kv: TorchKV, batch: Batch, scale: float) -> Tensor:
        if batch.parents.shape[0]:
            return super().attend(q, layer_kv, batch, scale)
        return self._library.attend(q, layer_kv, batch, scale)

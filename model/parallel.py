"""Tensor parallelism: processes that compute every layer together (part.py). One leads, the others follow its calls.

The leader is a Transformer like any other. Before it computes, it tells the followers what; they hold their part of
the weights and of the KV pool, and no more.
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

from verdraft.kernels.base import Batch, KernelUnavailable, LayerKV
from verdraft.kernels.blocks import Activations, Quantization
from verdraft.kernels.chooser import choose_kernels
from verdraft.model.config import read_config
from verdraft.model.errors import ModelError
from verdraft.model.followers import Followers, end_with_leader
from verdraft.model.load import load_model
from verdraft.model.part import Part, check_divides
from verdraft.model.transformer import Transformer

_JOIN: Final = timedelta(minutes=2)  # for every process to start
_HEADER: Final = 9  # numbers of a call, its own included
_TENSORS: Final = ("cu_q", "seq_lens", "pages", "slots", "positions", "parents")
_IDLE: Final = timedelta(days=3650)  # between two calls


class Call(IntEnum):
    """What the leader asks for; the numbers behind it are the arguments."""

    POOL = 0
    FORWARD = 1
    WRITE_KV = 2
    MOVE = 3
    END = 4


@dataclass(frozen=True, slots=True)
class Job:
    """How every process loads its part; the fields are those of choose_kernels and load_model."""

    path: Path
    size: int
    kernels: str
    device: str
    dtype: torch.dtype
    quantization: Quantization = "none"
    deterministic: bool = False
    activations: Activations = "float"
    threads: int = 1  # of each process

    def load(self, rank: int) -> Transformer:
        """Part `rank`, with all others of the group."""
        torch.set_num_threads(self.threads)
        device = torch.device(self.device, rank) if self.device == "cuda" else torch.device(self.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        kernels = choose_kernels(
            self.kernels, device, self.dtype, self.quantization, self.deterministic, self.activations
        )
        return load_model(self.path, kernels, self.dtype, device, Part(rank, self.size, gather_columns))


def gather_columns(x: Tensor) -> Tensor:  # [T, n] -> [T, size * n]
    """The columns of all processes, in the order of their ranks."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadingTransformer(Transformer):
    """Rank 0. Made by `load_parallel`. Every call raises ModelError after one that failed."""

    followers: Followers
    meeting: tempfile.TemporaryDirectory[str]  # NCCL looks into it every second

    def new_pool(self, num_blocks: int, block_size: int) -> Sequence[LayerKV]:
        with self.followers.led():
            self._tell(Call.POOL, num_blocks, block_size)
            return Transformer.new_pool(self, num_blocks, block_size)

    def forward(self, hidden: Tensor, batch: Batch, pool: Sequence[LayerKV], first: int, last: int) -> Tensor:
        with self.followers.led():
            self._share(Call.FORWARD, hidden, batch, first, last)
            return Transformer.forward(self, hidden, batch, pool, first, last)

    def write_kv(self, hidden: Tensor, batch: Batch, pool: Sequence[LayerKV], layer: int) -> None:
        with self.followers.led():
            self._share(Call.WRITE_KV, hidden, batch, layer, layer + 1)
            Transformer.write_kv(self, hidden, batch, pool, layer)

    def move(self, pool: Sequence[LayerKV], sources: Tensor, targets: Tensor) -> None:
        with self.followers.led():
            self._tell(Call.MOVE, sources.shape[0])
            dist.broadcast(torch.stack((sources, targets)), 0)
            Transformer.move(self, pool, sources, targets)

    def check(self) -> None:
        self.followers.check()

    def close(self) -> None:
        """Let the followers end; they also do when this process does."""
        if not self.followers.lost:
            self.followers.leaving = True
            self._tell(Call.END)
        dist.destroy_process_group()
        self.meeting.cleanup()

    def _share(self, call: Call, hidden: Tensor, batch: Batch, first: int, last: int) -> None:
        sizes = (*batch.pages.shape, batch.slots.shape[0], batch.parents.shape[0], batch.max_q, batch.max_k)
        self._tell(call, first, last, *sizes)
        dist.broadcast(hidden.contiguous(), 0)
        dist.broadcast(_joined(batch), 0)

    def _tell(self, call: Call, *numbers: int) -> None:
        header = [call, *numbers, *[0] * (_HEADER - 1 - len(numbers))]
        dist.broadcast(torch.tensor(header, device=self.device), 0)


def _joined(batch: Batch) -> Tensor:
    """All of a batch's tensors as one of int64."""
    return torch.cat([getattr(batch, name).flatten().long() for name in _TENSORS])


def _split(joined: Tensor, rows: int, width: int, tokens: int, nodes: int, max_q: int, max_k: int) -> Batch:
    sizes = (rows + 1, rows, rows * width, tokens, tokens, nodes)
    cu_q, seq_lens, pages, slots, positions, parents = joined.split_with_sizes(sizes)
    pages = pages.view(rows, width)
    return Batch(cu_q.int(), seq_lens.int(), pages.int(), slots, positions, max_q, max_k, parents.int())


@torch.inference_mode()
def follow(model: Transformer) -> None:
    """Do what the leader does, until it ends."""
    pool: Sequence[LayerKV] = ()
    while True:
        header = _heard(_HEADER, model.device, torch.int64)
        call, *numbers = header.tolist()
        match call:
            case Call.POOL:
                pool = model.new_pool(numbers[0], numbers[1])
            case Call.FORWARD | Call.WRITE_KV:
                first, last, rows, width, tokens, nodes, max_q, max_k = numbers
                hidden = _heard(tokens * model.config.hidden_size, model.device, model.dtype).view(tokens, -1)
                size = 2 * rows + 1 + rows * width + 2 * tokens + nodes
                joined = _heard(size, model.device, torch.int64)
                batch = _split(joined, rows, width, tokens, nodes, max_q, max_k)
                if call == Call.FORWARD:
                    model.forward(hidden, batch, pool, first, last)
                else:
                    model.write_kv(hidden, batch, pool, first)
            case Call.MOVE:
                sources, targets = _heard(2 * numbers[0], model.device, torch.int64).view(2, -1)
                model.move(pool, sources, targets)
            case Call.END:
                dist.destroy_process_group()
                return


def _heard(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(size, dtype=dtype, device=device)
    dist.broadcast(tensor, 0)
    return tensor


def load_parallel(job: Job) -> LeadingTransformer:
    """The leader of job.size processes, the others of which are started here and end with this one.

    Raises ModelError, also while this process leads another model; KernelUnavailable where there are not enough GPUs.
    """
    if dist.is_initialized():
        raise ModelError("tensor_parallel: this process already leads a model, or uses torch.distributed otherwise")
    check_divides(read_config(job.path), job.size)
    if job.device == "cuda" and job.size > torch.cuda.device_count():
        raise KernelUnavailable(f"tensor_parallel: {job.size} GPUs are needed, torch finds {torch.cuda.device_count()}")
    job = replace(job, threads=max(1, torch.get_num_threads() // job.size))
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    meeting, context = str(Path(folder.name) / "meeting"), processes.get_context("spawn")
    ranks = range(1, job.size)
    others = [context.Process(target=_follower, args=(job, rank, meeting), daemon=True) for rank in ranks]
    for process in others:
        process.start()
    followers = Followers(others)
    followers.watch()
    try:
        with followers.led():
            _join(job, 0, meeting)
            model = job.load(0)
            dist.barrier()
            followers.check()
    except BaseException:
        if dist.is_initialized():
            dist.destroy_process_group()
        folder.cleanup()
        raise
    parts: dict[str, Any] = {part.name: getattr(model, part.name) for part in fields(model)}
    return LeadingTransformer(**parts, followers=followers, meeting=folder)


def _join(job: Job, rank: int, meeting: str) -> None:
    # Otherwise a process that dies takes this one with it, before anybody hears why.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    store = dist.FileStore(meeting, job.size)  # type: ignore[attr-defined]  # public, but not in __all__
    store.set_timeout(_JOIN)
    backend = "nccl" if job.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=job.size, timeout=_IDLE)


def _follower(job: Job, rank: int, meeting: str) -> None:
    end_with_leader()
    _join(job, rank, meeting)
    model = job.load(rank)
    dist.barrier()
    follow(model)

"""Passes of a model, or of an EAGLE head, that are recorded once per size and replayed, so that one costs one launch.

A pass is filled up to the next of a few sizes: rows of the batch with no query, tokens of no row, whose K and V go to a
page that no sequence owns. Kernels read the true sizes from memory, so one recording serves every mix inside its size.
Knows no scheduler; how a recording is made is handed in.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from verdraft.kernels.base import Batch, LayerKV
from verdraft.model.eagle import EagleHead
from verdraft.model.transformer import Transformer

logger = logging.getLogger("verdraft.recordings")

TOKENS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # of a recorded pass; longer ones run as they are
MEMORY: Final = 1 << 30  # bytes that recordings may take; beyond, passes of new sizes run as they are

Work = Callable[[], Tensor]
Pass = Callable[[Sequence[Tensor], Batch], Tensor]  # tensors [T, ...] of its tokens, the batch: [T, hidden]


class Size(NamedTuple):
    """What a recording is made for: layers [first, last), and at most so many tokens, rows, and pages a row."""

    first: int
    last: int
    tokens: int
    rows: int
    width: int
    tree: bool


def size_of(batch: Batch, first: int, last: int) -> Size | None:
    """The smallest that holds this pass; None: none does."""
    num = batch.slots.shape[0]
    tokens = next((tokens for tokens in TOKENS if num <= tokens), None)
    if tokens is None:
        return None
    rows, width = (_power_of_2(n) for n in batch.pages.shape)
    return Size(first, last, tokens, rows, width, batch.parents.shape[0] > 0)


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


class Recorder(Protocol):
    """Makes recordings: `record(work)` runs `work` and returns what runs it again, on whatever the tensors that it
    reads then hold; `full`: no more of them."""

    @property
    def full(self) -> bool: ...

    def record(self, work: Work) -> Work: ...


class CudaRecorder:
    """CUDA graphs that share one memory pool, up to `memory` bytes."""

    def __init__(self, memory: int = MEMORY) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._left = memory

    @property
    def full(self) -> bool:
        return self._left <= 0

    def record(self, work: Work) -> Work:
        work()  # compiles kernels and lets libraries allocate, which is forbidden while recording
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # torch.cuda.graph does that too: what it frees is no part of the recording
        before, graph, stream = torch.cuda.memory_reserved(), torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                out = work()
        finally:
            torch.cuda.set_stream(stream)  # one that fails would leave us in its own
        self._left -= torch.cuda.memory_reserved() - before

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


@dataclass(frozen=True, slots=True)
class Recording:
    """The tensors that a recorded pass reads, and the pass."""

    inputs: Sequence[Tensor]  # [tokens, ...] each
    batch: Batch
    replay: Work

    def run(self, inputs: Sequence[Tensor], batch: Batch, spare_slot: int) -> Tensor:
        fill(self.inputs, self.batch, inputs, batch, spare_slot)
        return self.replay()[: batch.slots.shape[0]].clone()


def fill(buffers: Sequence[Tensor], buffer: Batch, inputs: Sequence[Tensor], batch: Batch, spare_slot: int) -> None:
    """Put a pass of T tokens into buffers of a larger size."""
    num, rows = batch.slots.shape[0], batch.seq_lens.shape[0]
    for larger, rows_in in zip(buffers, inputs, strict=True):
        larger[:num] = rows_in
    buffer.cu_q[: rows + 1] = batch.cu_q
    buffer.cu_q[rows + 1 :] = num
    buffer.seq_lens[:rows] = batch.seq_lens
    buffer.seq_lens[rows:] = 0
    buffer.pages[:rows, : batch.pages.shape[1]] = batch.pages
    buffer.slots[:num] = batch.slots
    buffer.slots[num:] = spare_slot
    buffer.positions[:num] = batch.positions
    buffer.positions[num:] = 0
    buffer.parents[:num] = batch.parents


def empty_batch(size: Size, page_size: int, device: torch.device) -> Batch:
    """Buffers for every pass of a size."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Batch(
        cu_q=zeros(size.rows + 1),
        seq_lens=zeros(size.rows),
        pages=zeros(size.rows, size.width),
        slots=zeros(size.tokens, dtype=torch.int64),
        positions=zeros(size.tokens, dtype=torch.int64),
        max_q=size.tokens,
        max_k=size.width * page_size,
        parents=zeros(size.tokens if size.tree else 0),
    )


@dataclass(slots=True)
class Recordings:
    """What was recorded so far, for one KV pool."""

    recorder: Recorder
    pool: Sequence[LayerKV] = ()
    page_size: int = 0
    spare_slot: int = 0
    by_size: dict[Size, Recording] = field(default_factory=dict)
    failed: bool = False  # then no more are tried

    @property
    def full(self) -> bool:
        """No more recordings than there are."""
        return self.failed or self.recorder.full

    def serve(self, pool: Sequence[LayerKV], num_blocks: int, block_size: int) -> Sequence[LayerKV]:
        """From now on for `pool`, whose page `num_blocks` no sequence owns."""
        self.pool, self.page_size, self.spare_slot = pool, block_size, num_blocks * block_size
        self.by_size.clear()
        return pool

    def run(
        self, work: Pass, inputs: Sequence[Tensor], batch: Batch, pool: Sequence[LayerKV], first: int, last: int
    ) -> Tensor:
        """What `work` makes of these: layers [first, last) with this pool. Recorded before if possible."""
        size = size_of(batch, first, last) if pool is self.pool else None
        if size is None:
            return work(inputs, batch)
        if size not in self.by_size and not self.full:
            self._try_to_record(size, work, inputs, batch)
        recording = self.by_size.get(size)
        return recording.run(inputs, batch, self.spare_slot) if recording else work(inputs, batch)

    def _try_to_record(self, size: Size, work: Pass, inputs: Sequence[Tensor], batch: Batch) -> None:
        """Nothing where memory or a library does not allow it: that costs time and no request."""
        try:
            self.by_size[size] = self._record(size, work, inputs, batch)
        except RuntimeError:
            logger.exception("no more passes are recorded, since one of %d tokens could not be", size.tokens)
            self.failed = True

    def _record(self, size: Size, work: Pass, inputs: Sequence[Tensor], batch: Batch) -> Recording:
        larger = [one.new_zeros((size.tokens, *one.shape[1:])) for one in inputs]
        buffer = empty_batch(size, self.page_size, batch.slots.device)
        fill(larger, buffer, inputs, batch, self.spare_slot)
        return Recording(larger, buffer, self.recorder.record(lambda: work(larger, buffer)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTransformer(Transformer):
    """A Transformer that records and replays; the rest is as it was. Made by `with_recordings`."""

    recordings: Recordings

    def new_pool(self, num_blocks: int, block_size: int) -> Sequence[LayerKV]:
        pool = Transformer.new_pool(self, num_blocks + 1, block_size)
        return self.recordings.serve(pool, num_blocks, block_size)

    def forward(self, hidden: Tensor, batch: Batch, pool: Sequence[LayerKV], first: int, last: int) -> Tensor:
        def work(inputs: Sequence[Tensor], batch: Batch) -> Tensor:
            return Transformer.forward(self, inputs[0], batch, pool, first, last)

        return self.recordings.run(work, (hidden,), batch, pool, first, last) if first < last else hidden


def with_recordings(model: Transformer, recorder: Recorder) -> RecordedTransformer:
    """The same model, its short passes recorded by `recorder`."""
    parts: dict[str, Any] = {part.name: getattr(model, part.name) for part in fields(model)}
    return RecordedTransformer(**parts, recordings=Recordings(recorder))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEagle(EagleHead):
    """An EAGLE head whose steps are recorded. Made by `eagle_with_recordings`."""

    recordings: Recordings

    def new_pool(self, num_blocks: int, block_size: int) -> Sequence[LayerKV]:
        pool = EagleHead.new_pool(self, num_blocks + 1, block_size)
        return self.recordings.serve(pool, num_blocks, block_size)

    def forward(self, features: Tensor, tokens: Tensor, batch: Batch, pool: Sequence[LayerKV]) -> Tensor:
        def work(inputs: Sequence[Tensor], batch: Batch) -> Tensor:
            return EagleHead.forward(self, inputs[0], inputs[1], batch, pool)

        return self.recordings.run(work, (features, tokens), batch, pool, 0, 1)


def eagle_with_recordings(head: EagleHead, recorder: Recorder) -> RecordedEagle:
    """The same head, its short steps recorded by `recorder`."""
    parts: dict[str, Any] = {part.name: getattr(head, part.name) for part in fields(head)}
    return RecordedEagle(**parts, recordings=Recordings(recorder))

"""What bench/gpu.py measures: the machine, kernels and whole passes. Every part is a generator of lines."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final

import torch

from verdraft.bench.gpu_form import Form, can_record, recorder
from verdraft.bench.gpu_meter import Line, Meter, Speeds
from verdraft.bench.gpu_model import LLAMA_8B, TINY, even_batch, random_model
from verdraft.kernels.base import Batch, Kernels
from verdraft.kernels.chooser import choose_sampler
from verdraft.kernels.draws import Draws
from verdraft.model.config import ModelConfig
from verdraft.model.recordings import TOKENS, with_recordings
from verdraft.model.transformer import Transformer

SHORT: Final = {1, 8, 64}  # rows and queries of the short table, and of recorded passes


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: rows are those of a batch, queries those of a row, products the rows of a matrix product."""

    config: ModelConfig
    contexts: Sequence[int]
    pages: Sequence[int]  # tokens in one
    rows: Sequence[int]
    queries: Sequence[int]
    products: Sequence[int]
    answer: int  # tokens of every request to an engine


POWERS = (1, 2, 4, 8, 16, 32, 64)
FULL = Sizes(LLAMA_8B, (1024, 8192), (16, 64, 256), POWERS, POWERS, (*POWERS, 128, 256), 64)
REHEARSAL = Sizes(replace(TINY, vocab_size=320), (40,), (8, 16), (1, 8), (1, 3), (1, 6), 6)


@dataclass(frozen=True, slots=True)
class Bench:
    """What a part gets: `kernels` are those of `form`, if it is about one."""

    meter: Meter
    sizes: Sizes
    form: Form
    kernels: Kernels

    @property
    def name(self) -> str:
        return self.form.name(self.kernels)


Part = Callable[[Bench], Iterator[Line]]


def floor(bench: Bench) -> Iterator[Line]:
    """What floors are made of; other lines stand beside what was found here."""
    meter = bench.meter
    data = torch.zeros(meter.probe, meter.probe, 2, dtype=torch.float32, device=meter.device)
    square = meter.randn(meter.probe, meter.probe)
    yield Line("floor", "reading", f"{4 * data.numel()} bytes", 1e6 * meter.seconds(data.sum))
    flops = f"{2 * meter.probe**3} operations"
    yield Line("floor", "multiplying", flops, 1e6 * meter.seconds(lambda: square @ square))


def speeds_of(lines: Sequence[Line]) -> Speeds | None:
    """From the lines of `floor`; None if one is missing."""
    found = {line.form: int(line.case.split()[0]) / (1e-6 * line.us) for line in lines if line.part == "floor"}
    return Speeds(found["reading"], found["multiplying"]) if len(found) == 2 else None


def attention(bench: Bench) -> Iterator[Line]:
    """One layer's attention, keys and values read once."""
    sizes, meter, kernels = bench.sizes, bench.meter, bench.kernels
    heads, kv_heads, dim = sizes.config.num_heads, sizes.config.num_kv_heads, sizes.config.head_dim
    pages = [size for size in sizes.pages if not kernels.page_sizes or size in kernels.page_sizes]
    few = [[n for n in numbers if n in SHORT] for numbers in (sizes.rows, sizes.queries)]
    for size, context, rows, queries in product(pages, sizes.contexts, *few):
        batch = even_batch(rows, queries, context, size, meter.device)
        layer = kernels.pool(1, batch.pages.numel(), size, kv_heads, dim, meter.dtype, meter.device)[0]
        q = meter.randn(rows * queries, heads, dim)
        read = 2 * rows * context * kv_heads * dim * meter.dtype.itemsize
        flops = 4 * rows * queries * context * heads * dim
        case = f"{rows} x {queries} queries, context {context}, pages of {size}"
        call = partial(kernels.attend, q, layer, batch, dim**-0.5)
        short = size == kernels.page_size and context == sizes.contexts[-1]
        yield meter.line("attention", bench.name, case, call, read, flops, short)


def products(bench: Bench) -> Iterator[Line]:
    """A layer's four products together."""
    meter, kernels = bench.meter, bench.kernels
    hidden, inner, queries, keys = _widths(bench.sizes.config)
    shapes = [(hidden, queries + keys), (queries, hidden), (hidden, 2 * inner), (inner, hidden)]
    packed = [kernels.pack(meter.randn(outs, ins)) for ins, outs in shapes]
    size = sum(ins * outs for ins, outs in shapes)

    def call(jobs: Sequence[tuple[torch.Tensor, object]]) -> object:
        return [kernels.linear(*job) for job in jobs]

    for rows in bench.sizes.products:
        jobs = [(meter.randn(rows, ins), weight) for (ins, _), weight in zip(shapes, packed, strict=True)]
        read, flops = size * bench.form.weight_bytes(meter.dtype), 2 * rows * size
        yield meter.line("products", bench.name, f"{rows} rows", partial(call, jobs), read, flops, rows in SHORT)


def passes(bench: Bench) -> Iterator[Line]:
    """All layers, and the head on every token, which is what verification costs; as it is and recorded."""
    sizes, meter, kernels = bench.sizes, bench.meter, bench.kernels
    model = random_model(sizes.config, kernels, meter.dtype, meter.device)
    for rows, queries in product(sizes.rows, sizes.queries):
        short = {rows, queries} <= SHORT
        batch = even_batch(rows, queries, sizes.contexts[0], kernels.page_size, meter.device)
        yield _pass(bench, model, f"{rows} x {queries} tokens", batch, short)
        if short and rows * queries <= TOKENS[-1] and can_record(kernels, meter.device):
            recorded = with_recordings(model, recorder(meter.device))
            yield _pass(bench, recorded, f"{rows} x {queries} tokens, recorded", batch, short)


def _pass(bench: Bench, model: Transformer, case: str, batch: Batch, short: bool) -> Line:
    meter, config = bench.meter, model.config
    pool = model.new_pool(batch.pages.numel(), model.kernels.page_size)
    tokens = torch.randint(0, config.vocab_size, (len(batch.slots),), device=meter.device)

    def call() -> object:
        hidden = model.embed(tokens, batch.positions)
        return model.logits(model.forward(hidden, batch, pool, 0, config.num_layers))

    weights = num_weights(config)
    read = weights * bench.form.weight_bytes(meter.dtype) + int(batch.seq_lens.sum()) * model.kv_bytes_per_token
    return meter.line("passes", bench.name, case, call, read, 2 * len(tokens) * weights, short)


def sampling(bench: Bench) -> Iterator[Line]:
    """The law's tokens where the logits are, and what the way to the host costs instead."""
    meter, sample = bench.meter, choose_sampler(bench.meter.device)
    for rows in bench.sizes.rows:
        logits = torch.randn(rows, bench.sizes.config.vocab_size, device=meter.device)
        numbers = torch.arange(rows, device=meter.device)
        draws = Draws(torch.ones_like(numbers, dtype=torch.float64), numbers, numbers, numbers)
        read, call = 4 * logits.numel(), partial(sample, logits, draws, None)
        yield meter.line("sampling", "on the device", f"{rows} rows", call, read, short=rows in SHORT)
        limits = torch.tensor([[50.0, 0.9, -math.inf, 0.0]] * rows, dtype=torch.float64, device=meter.device)
        call = partial(sample, logits, replace(draws, limits=limits, most=50), None)
        yield meter.line("sampling", "top-k 50, top-p 0.9", f"{rows} rows", call, read, short=rows in SHORT)
        yield Line("sampling", "to the host", f"{rows} rows", 1e6 * meter.seconds(logits.cpu), short=rows in SHORT)


def num_weights(config: ModelConfig) -> int:
    """Of all products, the head's included."""
    hidden, inner, q, keys = _widths(config)
    return config.num_layers * hidden * (2 * q + keys + 3 * inner) + config.vocab_size * hidden


def _widths(config: ModelConfig) -> tuple[int, int, int, int]:
    """Hidden, inner, all queries, all keys and values."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.hidden_size, config.intermediate_size, heads, 2 * kv_heads

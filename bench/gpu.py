"""`python -m verdraft.bench.gpu`: what GPU kernels and whole passes cost, each beside its floor.

Prints a table and writes JSON; what time or memory does not allow is named. `--rehearse` runs every part with tiny
sizes on the CPU, to show that it runs: those times mean nothing.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from verdraft.bench.gpu_meter import Line, Meter
from verdraft.bench.gpu_model import LLAMA_8B, TINY, even_batch, random_model
from verdraft.kernels.base import Batch, Kernels, KernelUnavailable
from verdraft.kernels.blocks import GROUP, Quantization
from verdraft.kernels.chooser import BACKENDS, Wish, choose_kernels, choose_sampler, survey, versions
from verdraft.kernels.draws import Draws
from verdraft.kernels.torch_ref import TorchKernels
from verdraft.model.config import ModelConfig
from verdraft.model.recordings import CudaRecorder, with_recordings
from verdraft.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: rows are those of a batch, queries those of a row, products the rows of a matrix product."""

    config: ModelConfig
    contexts: Sequence[int]
    rows: Sequence[int]
    queries: Sequence[int]
    products: Sequence[int]


FULL = Sizes(LLAMA_8B, (1024, 8192), (1, 8, 64), (1, 4, 8, 16, 64), (1, 2, 4, 8, 16, 64, 128, 256))
REHEARSAL = Sizes(TINY, (40,), (1, 2), (1, 3), (1, 6))


@dataclass(frozen=True, slots=True)
class Form:
    """A backend as it was wished for."""

    name: str
    kernels: Kernels
    quantization: Quantization = "none"


def backends(device: torch.device, dtype: torch.dtype) -> Iterator[Form]:
    """All that can run on a GPU, and their deterministic forms; on a CPU, what the rehearsal needs."""
    if device.type == "cpu":
        yield Form("torch", TorchKernels())
        return
    wishes: list[tuple[Quantization, bool, str]] = [
        ("none", False, ""),
        ("none", True, " exact"),
        ("int8", True, " int8"),
    ]
    for (quantization, deterministic, suffix), name in product(wishes, BACKENDS):
        if survey(Wish(device, dtype, quantization, deterministic))[name] is None:
            kernels = choose_kernels(name, device, dtype, quantization, deterministic)
            yield Form(f"{kernels.name}{suffix}", kernels, quantization)


def attention(meter: Meter, sizes: Sizes, form: Form) -> Iterator[Line]:
    """One layer's attention, keys and values read once."""
    config, dtype, device, kernels = sizes.config, meter.dtype, meter.device, form.kernels
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    for context, rows, queries in product(sizes.contexts, sizes.rows, sizes.queries):
        batch = even_batch(rows, queries, context, kernels.page_size, device)
        layer = kernels.pool(1, batch.pages.numel(), kernels.page_size, kv_heads, dim, dtype, device)[0]
        q = torch.randn(rows * queries, heads, dim, dtype=dtype, device=device)
        read = 2 * rows * context * kv_heads * dim * dtype.itemsize
        flops = 4 * rows * queries * context * heads * dim
        what = f"{form.name}: {rows} x {queries} queries, context {context}"
        yield meter.line("attention", what, partial(kernels.attend, q, layer, batch, dim**-0.5), read, flops)


def products(meter: Meter, sizes: Sizes, form: Form) -> Iterator[Line]:
    """A layer's four products together."""
    config, dtype, device, kernels = sizes.config, meter.dtype, meter.device, form.kernels
    hidden, inner, queries, keys = _widths(config)
    shapes = [(hidden, queries + keys), (queries, hidden), (hidden, 2 * inner), (inner, hidden)]
    packed = [kernels.pack(torch.randn(outs, ins, dtype=dtype, device=device)) for ins, outs in shapes]
    size = sum(ins * outs for ins, outs in shapes)
    for rows in sizes.products:
        jobs = [
            (torch.randn(rows, ins, dtype=dtype, device=device), p) for (ins, _), p in zip(shapes, packed, strict=True)
        ]

        def call() -> object:
            return [kernels.linear(*job) for job in jobs]  # noqa: B023

        yield meter.line("products", f"{form.name}: {rows} rows", call, size * _bytes(form, dtype), 2 * rows * size)


def passes(meter: Meter, sizes: Sizes, form: Form) -> Iterator[Line]:
    """All layers, and the head on every token; as it is and recorded."""
    kernels = form.kernels
    model = random_model(sizes.config, kernels, meter.dtype, meter.device)
    for recorded, rows, queries in product((False, True), sizes.rows, sizes.queries):
        if rows * queries > max(sizes.products) or (recorded and not (kernels.graphs and meter.device.type == "cuda")):
            continue
        run = with_recordings(model, CudaRecorder()) if recorded else model
        what = f"{form.name}{', recorded' if recorded else ''}: {rows} x {queries} tokens"
        even = even_batch(rows, queries, sizes.contexts[0], kernels.page_size, meter.device)
        yield _pass(meter, run, what, _bytes(form, meter.dtype), even)


def _bytes(form: Form, dtype: torch.dtype) -> float:
    """Of a weight; in 8 bits with its share of a scale."""
    return 1 + 2 / GROUP if form.quantization == "int8" else dtype.itemsize


def _pass(meter: Meter, model: Transformer, what: str, weight_bytes: float, batch: Batch) -> Line:
    config = model.config
    pool = model.new_pool(batch.pages.numel(), model.kernels.page_size)
    tokens = torch.randint(0, config.vocab_size, (len(batch.slots),), device=meter.device)

    def call() -> object:
        hidden = model.embed(tokens, batch.positions)
        return model.logits(model.forward(hidden, batch, pool, 0, config.num_layers))

    hidden, inner, q, keys = _widths(config)
    weights = config.num_layers * hidden * (2 * q + keys + 3 * inner) + config.vocab_size * hidden
    read = weights * weight_bytes + int(batch.seq_lens.sum()) * model.kv_bytes_per_token
    return meter.line("passes", what, call, read, 2 * len(tokens) * weights)


def sampling(meter: Meter, sizes: Sizes, form: Form) -> Iterator[Line]:
    """The law's tokens where the logits are, and what the way to the host costs instead."""
    sample = choose_sampler(meter.device)
    for rows in sizes.rows:
        logits = torch.randn(rows, sizes.config.vocab_size, device=meter.device)
        numbers = torch.arange(rows, device=meter.device)
        draws = Draws(torch.ones_like(numbers, dtype=torch.float64), numbers, numbers, numbers)
        size = 4 * logits.numel()
        yield meter.line("sampling", f"{rows} rows on the device", partial(sample, logits, draws, None), size)
        yield Line("sampling", f"{rows} rows to the host", 1e6 * meter.seconds(logits.cpu))


def _widths(config: ModelConfig) -> tuple[int, int, int, int]:
    """Hidden, inner, all queries, all keys and values."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.hidden_size, config.intermediate_size, heads, 2 * kv_heads


def measure(meter: Meter, sizes: Sizes, seconds: float) -> Iterator[Line]:
    """Every part on every backend, as far as the time goes."""
    ends = time.monotonic() + seconds
    meter.measure_machine()
    found = list(backends(meter.device, meter.dtype))
    quick = [form for form in found if not form.kernels.exact]
    jobs = [(attention, form) for form in quick]
    jobs += [(products, form) for form in (*quick[-1:], *(form for form in found if form.kernels.exact))]
    jobs += [(passes, form) for form in found if form.name != "torch" or meter.device.type == "cpu"]
    for part, form in [*jobs, (sampling, found[0])]:
        try:
            for line in part(meter, sizes, form):
                yield line
                if time.monotonic() > ends:
                    meter.note(f"no time for {part.__name__} with {form.name} and what follows")
                    return
        except (torch.cuda.OutOfMemoryError, KernelUnavailable) as error:
            meter.note(f"{part.__name__} with {form.name} ended: {str(error).splitlines()[0]}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="verdraft.bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--seconds", type=float, default=240.0, help="after which what is left is skipped")
    parser.add_argument("--layers", type=int, help="of the model (default: all 32)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    args = parser.parse_args(argv)
    if args.rehearse:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # where it is installed, the sampler runs too
        sizes, meter = REHEARSAL, Meter(torch.device("cpu"), torch.float32, probe=64, budget=0.0)
    elif torch.cuda.is_available():
        sizes, meter = FULL, Meter(torch.device("cuda"), torch.bfloat16, probe=8192, budget=0.05)
    else:
        parser.error("torch finds no GPU; --rehearse runs on the CPU")
    if args.layers:
        sizes = replace(sizes, config=replace(sizes.config, num_layers=args.layers))
    lines = []
    with torch.inference_mode():
        for line in measure(meter, sizes, args.seconds):
            lines.append(asdict(line))
            print(line, flush=True)
    on_gpu = meter.device.type == "cuda"
    if on_gpu:
        meter.note(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    result = {"device": device, "versions": dict(versions()), "notes": meter.notes, "lines": lines}
    args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

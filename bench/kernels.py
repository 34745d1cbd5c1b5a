"""`python -m verdraft.bench.kernels`: each CPU kernel against its floor, torch and the portable fallback, by rows.

The floor of a kernel is the larger of its bytes over the machine's read speed and its multiplications over
the machine's product speed, both measured first. Then what layers and head of a model cost, what passes over few rows
cost beside reading their bytes, and which part of a step is Python. Trust nothing from a busy machine.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from verdraft.bench.floor import print_floors
from verdraft.bench.kernel_flags import add_kernel_flags, kernels_of
from verdraft.bench.python_share import print_share
from verdraft.bench.segments import print_segments
from verdraft.bench.timing import CPU, one_sequence, seconds
from verdraft.kernels.base import Kernels
from verdraft.kernels.chooser import choose_contenders, choose_kernels, choose_philox
from verdraft.kernels.cpu import CpuKernels
from verdraft.kernels.hugepages import HugePages
from verdraft.kernels.noise import Contenders, Noise, PhiloxBlocks, philox_blocks
from verdraft.kernels.portable import PortableOps
from verdraft.kernels.sampling import LogitParams, TokenHistory, choose_token
from verdraft.kernels.torch_ref import TorchKernels
from verdraft.model.demo import demo_model

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHAPES = {"qkv": (576, 960), "o": (576, 576), "gate_up": (576, 3072), "down": (1536, 576), "head": (576, 49152)}
HEADS, KV_HEADS, DIM, PAGE = 9, 3, 64, 16
Backends: TypeAlias = Sequence[Kernels]  # ours, torch's, the portable fallback
COLD = 64 << 20  # bytes of weights that no cache keeps from one call to the next


@dataclass(frozen=True, slots=True)
class Machine:
    bytes_per_s: float
    flops_per_s: float

    def floor(self, num_bytes: float, flops: float) -> float:
        """Seconds."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel at one number of rows: by us, by torch and by the portable fallback; and what none can avoid."""

    name: str
    rows: int
    calls: Sequence[Callable[[], object]]
    num_bytes: float
    flops: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="verdraft.bench.kernels", description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--context", type=int, default=512, help="keys that attention sees")
    parser.add_argument("--model", type=Path, help="folder whose segments are timed (default: the demo model)")
    parser.add_argument("--exits", type=int, nargs="*", default=[10, 20], help="layers where its segments end")
    add_kernel_flags(parser)  # of the segments
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        machine = measure_machine()
        print(f"{machine.bytes_per_s / 1e9:.1f} GB/s, {machine.flops_per_s / 1e9:.0f} GFLOP/s, {args.threads} threads")
        print(
            f"{'kernel':10} {'rows':>4} {'floor us':>9} {'ours us':>9} {'torch us':>9} {'portable':>9} {'of floor':>8}"
        )
        backends = (choose_kernels("auto", CPU, torch.float32), TorchKernels(), CpuKernels(PortableOps()))
        layers = [make_linear(backends, name, *shape) for name, shape in SHAPES.items()]
        for rows in ROWS:
            products = [linear(backends, layer, rows) for layer in layers]
            others = [attention(backends, rows, args.context), *small(backends, rows), *sampling(rows)]
            for work in [*products, *others]:
                report(work, machine)
        print_segments(args.model or demo_model(), kernels_of(args), args.exits, args.context)
    print_floors(args.model or demo_model(), args.context)
    print_share(args.model or demo_model(), args.context)


def report(work: Work, machine: Machine) -> None:
    floor, times = machine.floor(work.num_bytes, work.flops), [seconds(call) for call in work.calls]
    columns = "".join(f" {t * 1e6:9.1f}" for t in (floor, *times))
    print(f"{work.name:10} {work.rows:4}{columns} {floor / times[0]:8.0%}", flush=True)


def measure_machine() -> Machine:
    data, a = HugePages().zeros(64 << 20).fill_(1), torch.ones(1024, 1024)
    read, product = seconds(data.sum, 0.5), seconds(lambda: a @ a, 0.5)
    return Machine(data.numel() * 4 / read, 2 * 1024**3 / product)


@dataclass(frozen=True, slots=True)
class Linear:
    """One shape of the model in so many copies that each call finds its weight in memory, as in a pass."""

    name: str
    inputs: int
    outputs: int
    packed: list[list[Any]]  # by backend


def make_linear(backends: Backends, name: str, inputs: int, outputs: int) -> Linear:
    weights = [torch.randn(outputs, inputs) for _ in range(-(-COLD // (4 * inputs * outputs)))]
    return Linear(name, inputs, outputs, [[backend.pack(weight) for weight in weights] for backend in backends])


def linear(backends: Backends, layer: Linear, rows: int) -> Work:
    x = torch.randn(rows, layer.inputs)

    def call(backend: Kernels, packed: list[Any]) -> Callable[[], object]:
        turns = cycle(packed)
        return lambda: backend.linear(x, next(turns))

    return Work(
        layer.name,
        rows,
        [call(backend, packed) for backend, packed in zip(backends, layer.packed, strict=True)],
        num_bytes=4 * (layer.inputs * layer.outputs + rows * (layer.inputs + layer.outputs)),
        flops=2 * rows * layer.inputs * layer.outputs,
    )


def attention(backends: Backends, rows: int, context: int) -> Work:
    """`rows` queries at the end of one context."""
    pages = -(-max(context, rows) // PAGE)
    q, batch = torch.randn(rows, HEADS, DIM), one_sequence(rows, max(context, rows), pages)

    def call(backend: Kernels) -> Callable[[], object]:
        layer = backend.pool(1, pages, PAGE, KV_HEADS, DIM, torch.float32, CPU)[0]
        return lambda: backend.attend(q, layer, batch, 0.125)

    return Work(
        "attend",
        rows,
        [call(backend) for backend in backends],
        num_bytes=4 * (2 * batch.max_k * KV_HEADS * DIM + 2 * q.numel()),
        flops=4 * rows * batch.max_k * HEADS * DIM,
    )


def small(backends: Backends, rows: int) -> list[Work]:
    x, gate_up, weight = torch.randn(rows, 576), torch.randn(rows, 3072), torch.ones(576)
    q, k, cos = torch.randn(rows, HEADS, DIM), torch.randn(rows, KV_HEADS, DIM), torch.ones(rows, DIM // 2)
    sin, slots = torch.zeros(rows, DIM // 2), torch.arange(rows)

    def work(name: str, numbers: int, make: Callable[[Kernels], Callable[[], object]]) -> Work:
        return Work(name, rows, [make(backend) for backend in backends], num_bytes=4 * numbers, flops=0)

    def write(backend: Kernels) -> Callable[[], object]:
        layer = backend.pool(1, -(-rows // PAGE), PAGE, KV_HEADS, DIM, torch.float32, CPU)[0]
        return lambda: backend.write(k, k, layer, slots)

    return [
        work("rms_norm", 2 * x.numel(), lambda b: lambda: b.rms_norm(x, weight, 1e-5)),
        work("layer_norm", 2 * x.numel(), lambda b: lambda: b.layer_norm(x, weight, weight, 1e-5)),
        work("silu_mul", 3 * gate_up.numel() // 2, lambda b: lambda: b.silu_mul(gate_up)),
        work("rope", 2 * (q.numel() + k.numel()), lambda b: lambda: b.rope(q, k, cos, sin)),
        work("write", 4 * k.numel(), write),
    ]


def sampling(rows: int) -> list[Work]:
    """One token per row of logits, unfiltered and from the nucleus."""
    logits = torch.randn(rows, SHAPES["head"][1]) * 3

    def choose(params: LogitParams, philox: PhiloxBlocks, contenders: Contenders | None) -> list[int]:
        history = TokenHistory(params)
        noises = (Noise(i, 0, 0, philox, contenders) for i in range(rows))
        return [
            choose_token(row, params, history, None, noise) for row, noise in zip(logits.numpy(), noises, strict=True)
        ]

    def work(name: str, params: LogitParams, rival: Callable[[], object]) -> Work:
        ours = partial(choose, params, choose_philox(), choose_contenders())
        portable = partial(choose, params, philox_blocks, None)
        return Work(name, rows, [ours, rival, portable], num_bytes=4 * logits.numel(), flops=0)

    return [
        work("sample", LogitParams(), lambda: logits.softmax(-1).multinomial(1)),
        work("top_p", LogitParams(top_p=0.9), lambda: torch_nucleus(logits, 0.9)),
    ]


def torch_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """The usual way: sort, cut, draw."""
    probs, tokens = logits.softmax(-1).sort(dim=-1, descending=True)
    probs[probs.cumsum(-1) - probs >= top_p] = 0.0
    return tokens.gather(-1, probs.multinomial(1))


if __name__ == "__main__":
    main()

"""`python -m verdraft.bench.kernels`: each CPU kernel against its floor and against torch, by number of rows.

The floor of a kernel is the larger of its bytes over the machine's read speed and its multiplications over
the machine's product speed, both measured first. Trust nothing from a busy machine.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verdraft.kernels.base import Batch, Kernels
from verdraft.kernels.chooser import choose_kernels, choose_philox
from verdraft.kernels.hugepages import HugePages
from verdraft.kernels.noise import Noise
from verdraft.kernels.sampling import LogitParams, TokenHistory, choose_token
from verdraft.kernels.torch_ref import TorchKernels

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHAPES = {"qkv": (576, 960), "o": (576, 576), "gate_up": (576, 3072), "down": (1536, 576), "head": (576, 49152)}
HEADS, KV_HEADS, DIM, PAGE = 9, 3, 64, 16
CPU = torch.device("cpu")
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
    """One kernel at one number of rows, its rival in torch, and what neither can avoid."""

    name: str
    rows: int
    ours: Callable[[], object]
    torch: Callable[[], object]
    num_bytes: float
    flops: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="verdraft.bench.kernels", description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--context", type=int, default=512, help="keys that attention sees")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        machine = measure_machine()
        print(f"{machine.bytes_per_s / 1e9:.1f} GB/s, {machine.flops_per_s / 1e9:.0f} GFLOP/s, {args.threads} threads")
        print(f"{'kernel':10} {'rows':>4} {'floor us':>9} {'ours us':>9} {'torch us':>9} {'of floor':>8}")
        kernels = choose_kernels("auto", CPU, torch.float32)
        layers = [make_linear(kernels, name, *shape) for name, shape in SHAPES.items()]
        for rows in ROWS:
            products = [linear(kernels, layer, rows) for layer in layers]
            others = [attention(kernels, rows, args.context), *small(kernels, rows), *sampling(rows)]
            for work in [*products, *others]:
                report(work, machine)


def report(work: Work, machine: Machine) -> None:
    floor, ours, rival = machine.floor(work.num_bytes, work.flops), seconds(work.ours), seconds(work.torch)
    share = f"{floor / ours:8.0%}"
    print(f"{work.name:10} {work.rows:4} {floor * 1e6:9.1f} {ours * 1e6:9.1f} {rival * 1e6:9.1f} {share}", flush=True)


def seconds(call: Callable[[], object], budget: float = 0.05) -> float:
    """Best time of a call."""
    call()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - begin < budget:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_machine() -> Machine:
    data, a = HugePages().zeros(64 << 20).fill_(1), torch.ones(1024, 1024)
    read, product = seconds(data.sum, 0.5), seconds(lambda: a @ a, 0.5)
    return Machine(data.numel() * 4 / read, 2 * 1024**3 / product)


@dataclass(frozen=True, slots=True)
class Linear:
    """One shape of the model in so many copies that each call finds its weight in memory, as in a pass."""

    name: str
    weights: list[Tensor]  # [out, in]
    packed: list[Any]


def make_linear(kernels: Kernels, name: str, inputs: int, outputs: int) -> Linear:
    copies = -(-COLD // (4 * inputs * outputs))
    weights = [torch.randn(outputs, inputs) for _ in range(copies)]
    return Linear(name, weights, [kernels.pack(weight) for weight in weights])


def linear(kernels: Kernels, layer: Linear, rows: int) -> Work:
    outputs, inputs = layer.weights[0].shape
    x, packed, weights = torch.randn(rows, inputs), cycle(layer.packed), cycle(layer.weights)
    return Work(
        layer.name,
        rows,
        lambda: kernels.linear(x, next(packed)),
        lambda: F.linear(x, next(weights)),
        num_bytes=4 * (inputs * outputs + rows * (inputs + outputs)),
        flops=2 * rows * inputs * outputs,
    )


def attention(kernels: Kernels, rows: int, context: int) -> Work:
    """`rows` queries at the end of one context."""
    pages = -(-max(context, rows) // PAGE)
    q, batch = torch.randn(rows, HEADS, DIM), one_sequence(rows, max(context, rows), pages)
    reference = TorchKernels()
    pools = [k.pool(1, pages, PAGE, KV_HEADS, DIM, torch.float32, CPU)[0] for k in (kernels, reference)]
    return Work(
        "attend",
        rows,
        lambda: kernels.attend(q, pools[0], batch, 0.125),
        lambda: reference.attend(q, pools[1], batch, 0.125),
        num_bytes=4 * (2 * batch.max_k * KV_HEADS * DIM + 2 * q.numel()),
        flops=4 * rows * batch.max_k * HEADS * DIM,
    )


def one_sequence(queries: int, context: int, pages: int) -> Batch:
    positions = torch.arange(context - queries, context)
    return Batch(
        cu_q=torch.tensor([0, queries], dtype=torch.int32),
        seq_lens=torch.tensor([context], dtype=torch.int32),
        pages=torch.arange(pages, dtype=torch.int32).unsqueeze(0),
        slots=positions,
        positions=positions,
        max_q=queries,
        max_k=context,
    )


def small(kernels: Kernels, rows: int) -> list[Work]:
    reference = TorchKernels()
    x, gate_up, weight = torch.randn(rows, 576), torch.randn(rows, 3072), torch.ones(576)
    q, k, cos = torch.randn(rows, HEADS, DIM), torch.randn(rows, KV_HEADS, DIM), torch.ones(rows, DIM // 2)
    sin, slots = torch.zeros(rows, DIM // 2), torch.arange(rows)
    pools = [b.pool(1, -(-rows // PAGE), PAGE, KV_HEADS, DIM, torch.float32, CPU)[0] for b in (kernels, reference)]

    def work(name: str, numbers: int, call: Callable[[Kernels], object]) -> Work:
        return Work(name, rows, lambda: call(kernels), lambda: call(reference), num_bytes=4 * numbers, flops=0)

    return [
        work("rms_norm", 2 * x.numel(), lambda b: b.rms_norm(x, weight, 1e-5)),
        work("layer_norm", 2 * x.numel(), lambda b: b.layer_norm(x, weight, weight, 1e-5)),
        work("silu_mul", 3 * gate_up.numel() // 2, lambda b: b.silu_mul(gate_up)),
        work("rope", 2 * (q.numel() + k.numel()), lambda b: b.rope(q, k, cos, sin)),
        work("write", 4 * k.numel(), lambda b: b.write(k, k, pools[b is reference], slots)),
    ]


def sampling(rows: int) -> list[Work]:
    """One token per row of logits, unfiltered and from the nucleus."""
    logits, philox = torch.randn(rows, SHAPES["head"][1]) * 3, choose_philox()

    def ours(params: LogitParams) -> list[int]:
        history = TokenHistory(params)
        return [
            choose_token(row, params, history, None, Noise(i, 0, 0, philox)) for i, row in enumerate(logits.numpy())
        ]

    def work(name: str, params: LogitParams, rival: Callable[[], object]) -> Work:
        return Work(name, rows, lambda: ours(params), rival, num_bytes=4 * logits.numel(), flops=0)

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

"""Attention on the GPU: every backend against float64, and the deterministic one bit for bit against itself."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from verdraft.kernels.base import Batch, Kernels
from verdraft.kernels.torch_ref import TorchKV, attend_one, visible

SCALE = 0.11
SHAPES = {"smollm2": (9, 3, 64), "llama 8b": (32, 8, 128), "mha": (8, 8, 64), "qwen2 7b": (28, 4, 128)}


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences as (context, queries) in scattered pages. Wherever no key lies, keys are NaN and values large."""

    q: Tensor
    layer: TorchKV
    batch: Batch

    def oracle(self) -> Tensor:
        """float64, sequence by sequence."""
        out, cu_q = torch.empty_like(self.q, dtype=torch.float64), self.batch.cu_q.tolist()
        for row, length in enumerate(self.batch.seq_lens.tolist()):
            own = slice(cu_q[row], cu_q[row + 1])
            k, v = (x.double() for x in self.layer.context(self.batch.pages[row], length))
            seen = visible(self.batch.parents[own].tolist(), own.stop - own.start, length).to(self.q.device)
            if own.start < own.stop:
                out[own] = attend_one(self.q[own].double(), k, v, SCALE, seen)
        return out

    def alone(self, row: int, query: int) -> tuple[Tensor, Batch]:
        """One query as a pass of its own."""
        at = int(self.batch.cu_q[row]) + query
        num = int(self.batch.cu_q[row + 1] - self.batch.cu_q[row])
        seen = int(self.batch.seq_lens[row]) - num + query + 1
        batch = replace(
            self.batch,
            cu_q=self.batch.cu_q.new_tensor([0, 1]),
            seq_lens=self.batch.seq_lens.new_tensor([seen]),
            pages=self.batch.pages[row : row + 1],
            positions=self.batch.positions[at : at + 1],
            slots=self.batch.slots[at : at + 1],
            max_q=1,
            max_k=seen,
        )
        return self.q[at : at + 1], batch


def make_case(
    kernels: Kernels, shape: tuple[int, int, int], lens: list[tuple[int, int]], device: torch.device, dtype: torch.dtype
) -> Case:
    torch.manual_seed(len(lens))
    (heads, kv_heads, dim), size = shape, kernels.page_size
    width = max(-(-length // size) for length, _ in lens)
    pages = torch.randperm(width * len(lens), device=device).int().view(len(lens), width)
    layer = kernels.pool(1, pages.numel(), size, kv_heads, dim, dtype, device)[0]
    layer.k.fill_(float("nan"))
    layer.v.fill_(3e4)  # values are finite always (TorchKernels.write)
    for table, (length, _) in zip(pages, lens, strict=True):
        places = torch.arange(length, device=device)
        slots = table[places // size].long() * size + places % size
        kernels.write(*torch.randn(2, length, kv_heads, dim, device=device).to(dtype), layer, slots)
    num = torch.tensor([0, *(n for _, n in lens)], device=device)
    positions = torch.cat([torch.arange(length - n, length, device=device) for length, n in lens])
    batch = Batch(
        cu_q=num.cumsum(0).int(),
        seq_lens=torch.tensor([length for length, _ in lens], dtype=torch.int32, device=device),
        pages=pages,
        slots=torch.zeros_like(positions),
        positions=positions,
        max_q=int(num.max()),
        max_k=max(length for length, _ in lens),
        parents=torch.empty(0, dtype=torch.int32, device=device),
    )
    fused = torch.randn(len(positions), heads + 2 * kv_heads, dim, device=device).to(dtype)
    return Case(fused[:, :heads], layer, batch)


def ragged(seed: int) -> list[tuple[int, int]]:
    rnd = random.Random(seed)
    lengths = [rnd.choice((1, 15, 64, 65, 257, 1000, 3000)) for _ in range(rnd.randint(1, 9))]
    return [(length, rnd.choice((1, 1, min(5, length), min(17, length), min(300, length)))) for length in lengths]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_attention_agrees_with_float64(
    fast: Kernels, shape: tuple[int, int, int], dtype: torch.dtype, seed: int, device: torch.device
) -> None:
    case = make_case(fast, shape, ragged(seed), device, dtype)
    out = fast.attend(case.q, case.layer, case.batch, SCALE)
    torch.testing.assert_close(out.double(), case.oracle(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_what_is_not_finite_reaches_only_rows_that_see_it(
    fast: Kernels, shape: tuple[int, int, int], bad: float, device: torch.device
) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    case = make_case(fast, shape, [(700, 300), (65, 1), (130, 5)], device, dtype)
    size, pages = fast.page_size, case.batch.pages
    for row, place in ((0, 500), (2, 127)):
        slot = pages[row, place // size].long().view(1) * size + place % size
        k, v = torch.ones(2, 1, *case.layer.k.shape[2:], dtype=dtype, device=device)
        v[0, :, 3] = bad
        fast.write(k, v, case.layer, slot)
    out = fast.attend(case.q, case.layer, case.batch, SCALE)
    spoilt = ~out.isfinite().flatten(1).all(1)
    assert spoilt.nonzero().flatten().tolist() == [*range(100, 300), 303, 304, 305]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_query_alone_has_the_bits_of_its_row(
    exact: Kernels, shape: tuple[int, int, int], half: torch.dtype, device: torch.device
) -> None:
    lens = [(1, 1), (700, 5), (64, 64), (3000, 1), (1025, 33), (130, 17)]
    case = make_case(exact, shape, lens, device, half)
    whole = exact.attend(case.q, case.layer, case.batch, SCALE)
    rows = [(row, query) for row, (_, num) in enumerate(lens) for query in range(num)]
    alone = torch.cat([exact.attend(q, case.layer, batch, SCALE) for q, batch in (case.alone(*at) for at in rows)])
    flipped = (alone != whole).flatten(1).any(1).nonzero().flatten().tolist()
    assert not flipped, f"queries with other bits: {[rows[i] for i in flipped]}"


@pytest.mark.parametrize("before", [0, 63, 640])
def test_a_node_of_a_tree_has_the_bits_of_its_chain(
    exact: Kernels, before: int, half: torch.dtype, device: torch.device
) -> None:
    parents = [-1, 0, 0, 1, 1, 2, 2, 3, 4, 6, *[5] * 30]
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    case = make_case(exact, SHAPES["llama 8b"], [(before + len(parents), len(parents))], device, half)
    tree = replace(
        case.batch,
        positions=torch.tensor(depths, device=device) + before,
        parents=torch.tensor(parents, dtype=torch.int32, device=device),
    )
    out = exact.attend(case.q, case.layer, tree, SCALE)
    torch.testing.assert_close(out.double(), replace(case, batch=tree).oracle(), rtol=0.02, atol=0.02)
    size = exact.page_size
    for node in (0, 2, 4, 8, 9, 20, 39):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        places = torch.tensor([*range(before), *(before + i for i in path)], device=device)
        old = case.batch.pages[0, places // size].long() * size + places % size
        new = exact.pool(1, -(-len(places) // size), size, 8, 128, half, device)[0]
        exact.write(
            case.layer.k.flatten(0, 1)[old], case.layer.v.flatten(0, 1)[old], new, torch.arange(len(old), device=device)
        )
        chain = replace(
            case.batch,
            cu_q=case.batch.cu_q.new_tensor([0, 1]),
            seq_lens=case.batch.seq_lens.new_tensor([len(places)]),
            pages=torch.arange(new.k.shape[0], dtype=torch.int32, device=device)[None],
            positions=torch.tensor([len(places) - 1], device=device),
            max_q=1,
            max_k=len(places),
        )
        assert torch.equal(exact.attend(case.q[node : node + 1], new, chain, SCALE), out[node : node + 1]), node

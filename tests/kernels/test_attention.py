"""Ragged paged attention: every backend against a float64 oracle, and the exact ones bit for bit against themselves."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from verdraft.kernels.base import Batch, Kernels
from verdraft.kernels.torch_ref import TorchKernels

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences as (context, queries); the first `shared` pages of all of them are the same."""

    lens: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    dim: int
    page_size: int = 16
    shared: int = 0


CASES = {
    "decode": Case(((1, 1), (15, 1), (16, 1), (17, 1), (130, 1)), heads=9, kv_heads=3, dim=64),
    "verify": Case(((6, 6), (16, 4), (17, 2), (300, 5)), heads=9, kv_heads=3, dim=64),
    "mixed": Case(((40, 40), (129, 1), (48, 7), (128, 100)), heads=8, kv_heads=2, dim=32),
    "chunk": Case(((257, 256),), heads=4, kv_heads=4, dim=64),
    "no rows": Case(((20, 0), (33, 3), (5, 0)), heads=4, kv_heads=1, dim=32),
    "wide heads": Case(((50, 3), (144, 17)), heads=4, kv_heads=1, dim=128),
    "widest heads": Case(((40, 9),), heads=2, kv_heads=2, dim=256),
    "odd width": Case(((31, 4),), heads=6, kv_heads=2, dim=40),
    "narrow heads": Case(((31, 4),), heads=2, kv_heads=2, dim=8),
    "shared prefix": Case(((40, 2), (35, 3), (32, 1)), heads=3, kv_heads=1, dim=64, shared=1),
    "pages of 1": Case(((19, 3),), heads=3, kv_heads=1, dim=32, page_size=1),
    "pages of 20": Case(((61, 3), (20, 1), (21, 21)), heads=3, kv_heads=3, dim=32, page_size=20),
    "pages of 256": Case(((300, 3), (256, 2)), heads=3, kv_heads=1, dim=32, page_size=256),
}


def random_case(seed: int) -> Case:
    rnd = random.Random(seed)
    lens = [rnd.randint(1, 150) for _ in range(rnd.randint(1, 4))]
    kv_heads = rnd.randint(1, 2)
    return Case(
        tuple((length, rnd.choice((0, 1, min(5, length), rnd.randint(1, length)))) for length in lens),
        heads=kv_heads * rnd.randint(1, 7),
        kv_heads=kv_heads,
        dim=rnd.choice((32, 64, 128)),
        page_size=rnd.randint(1, 40),
    )


CASES |= {f"random {seed}": random_case(seed) for seed in range(6)}


@dataclass(frozen=True, slots=True)
class Inputs:
    q: Tensor  # [T, heads, dim]
    keys: list[Tensor]  # per sequence [context, kv_heads, dim]
    values: list[Tensor]
    batch: Batch


def make_inputs(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    tables = block_tables(case)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    prefix = [randn(case.shared * case.page_size, case.kv_heads, case.dim) for _ in range(2)]

    def context(length: int, which: int) -> Tensor:
        return torch.cat((prefix[which], randn(length - len(prefix[which]), case.kv_heads, case.dim)))

    q_len = [q for _, q in case.lens]
    lengths = [length for length, _ in case.lens]
    slots = [slots_of(tables[b], range(length - q, length), case.page_size) for b, (length, q) in enumerate(case.lens)]
    positions = [torch.arange(length - q, length) for length, q in case.lens]
    return Inputs(
        q=randn(sum(q_len), case.heads, case.dim),
        keys=[context(length, 0) for length in lengths],
        values=[context(length, 1) for length in lengths],
        batch=Batch(
            cu_q=torch.tensor([0, *q_len]).cumsum(0).int(),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            pages=tables,
            slots=torch.cat(slots),
            positions=torch.cat(positions),
            max_q=max(q_len),
            max_k=max(lengths),
        ),
    )


def block_tables(case: Case) -> Tensor:
    """Scattered pages; entries beyond a context are arbitrary but valid."""
    width = max(-(-length // case.page_size) for length, _ in case.lens)
    count = width * len(case.lens)
    pages = torch.randperm(count, generator=torch.Generator().manual_seed(1)).int().view(len(case.lens), width)
    pages[:, : case.shared] = pages[0, : case.shared]
    return pages


def slots_of(table: Tensor, positions: Sequence[int], page_size: int) -> Tensor:
    slots = [int(table[p // page_size]) * page_size + p % page_size for p in positions]
    return torch.tensor(slots, dtype=torch.int64)


def fill_pool(kernels: Kernels, case: Case, inputs: Inputs) -> object:
    """A layer whose unused slots are all NaN."""
    pages = int(inputs.batch.pages.max()) + 1
    layer = kernels.pool(1, pages, case.page_size, case.kv_heads, case.dim, torch.float32, CPU)[0]
    layer.k.fill_(float("nan"))
    layer.v.fill_(float("nan"))
    for table, k, v in zip(inputs.batch.pages, inputs.keys, inputs.values, strict=True):
        kernels.write(k, v, layer, slots_of(table, range(len(k)), case.page_size))
    return layer


def oracle(case: Case, inputs: Inputs) -> Tensor:
    """float64, one query at a time, no code shared with a backend."""
    out, row = [], 0
    for (length, q_len), k, v in zip(case.lens, inputs.keys, inputs.values, strict=True):
        for seen in range(length - q_len + 1, length + 1):
            q = inputs.q[row].double().view(case.kv_heads, -1, case.dim)
            scores = torch.einsum("hgd,khd->hgk", q, k[:seen].double()) * case.dim**-0.5
            out.append(torch.einsum("hgk,khd->hgd", scores.softmax(-1), v[:seen].double()).flatten(0, 1))
            row += 1
    return torch.stack(out)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_agrees_with_the_oracle(kernels: Kernels, case: Case) -> None:
    inputs = make_inputs(case)
    out = kernels.attend(inputs.q, fill_pool(kernels, case, inputs), inputs.batch, case.dim**-0.5)
    torch.testing.assert_close(out.double(), oracle(case, inputs), rtol=0, atol=4e-6)


@pytest.mark.parametrize("name", ["decode", "verify", "mixed", "wide heads", "odd width", "pages of 20"])
def test_a_query_alone_equals_its_row_of_the_batch(exact: Kernels, name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    layer = fill_pool(exact, case, inputs)
    whole = exact.attend(inputs.q, layer, inputs.batch, 0.1)
    row = 0
    for b, (length, q_len) in enumerate(case.lens):
        for seen in range(length - q_len + 1, length + 1):
            alone = exact.attend(inputs.q[row : row + 1], layer, lone_query(inputs.batch, b, seen), 0.1)
            assert torch.equal(alone, whole[row : row + 1]), (b, seen)
            row += 1
    assert row == len(inputs.q)


def lone_query(batch: Batch, sequence: int, seen: int) -> Batch:
    return Batch(
        cu_q=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([seen], dtype=torch.int32),
        pages=batch.pages[sequence : sequence + 1],
        slots=batch.slots[:1],
        positions=batch.positions[:1],
        max_q=1,
        max_k=seen,
    )


def test_every_query_count_gives_the_same_rows(exact: Kernels) -> None:
    """Counts around the tile sizes inside the kernel: the last row always sees the same 150 keys."""
    case = Case(((150, 40),), heads=3, kv_heads=1, dim=32)
    inputs = make_inputs(case)
    layer = fill_pool(exact, case, inputs)
    whole = exact.attend(inputs.q, layer, inputs.batch, 0.2)
    for count in range(1, 40):
        batch = Batch(
            cu_q=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=inputs.batch.seq_lens,
            pages=inputs.batch.pages,
            slots=inputs.batch.slots[-count:],
            positions=inputs.batch.positions[-count:],
            max_q=count,
            max_k=150,
        )
        assert torch.equal(exact.attend(inputs.q[-count:], layer, batch, 0.2), whole[-count:]), count


def test_order_of_sequences_and_threads_change_nothing(exact: Kernels) -> None:
    case = CASES["verify"]
    inputs = make_inputs(case)
    layer = fill_pool(exact, case, inputs)
    order = [2, 0, 3, 1]
    parts = inputs.q.split([q for _, q in case.lens])
    q_len = torch.tensor([0] + [case.lens[b][1] for b in order])
    shuffled = Batch(
        cu_q=q_len.cumsum(0).int(),
        seq_lens=inputs.batch.seq_lens[order],
        pages=inputs.batch.pages[order],
        slots=inputs.batch.slots,
        positions=inputs.batch.positions,
        max_q=inputs.batch.max_q,
        max_k=inputs.batch.max_k,
    )
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = exact.attend(inputs.q, layer, inputs.batch, 0.1).split([q for _, q in case.lens])
        torch.set_num_threads(2)
        two = exact.attend(torch.cat([parts[b] for b in order]), layer, shuffled, 0.1)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(two, torch.cat([one[b] for b in order]))


def test_queries_may_be_views_of_a_fused_product(kernels: Kernels) -> None:
    case = CASES["verify"]
    inputs = make_inputs(case)
    fused = torch.randn(len(inputs.q), 15 * case.dim)
    view = fused[:, 2 * case.dim : 11 * case.dim].view(-1, 9, case.dim)
    layer = fill_pool(kernels, case, inputs)
    strided = kernels.attend(view, layer, inputs.batch, 0.1)
    torch.testing.assert_close(strided, kernels.attend(view.contiguous(), layer, inputs.batch, 0.1), rtol=0, atol=1e-6)
    assert strided.is_contiguous()


def test_large_scores_do_not_overflow(exact: Kernels) -> None:
    case = CASES["decode"]
    inputs = make_inputs(case)
    layer = fill_pool(exact, case, inputs)
    out = exact.attend(inputs.q * 1000, layer, inputs.batch, 1.0)
    assert torch.isfinite(out).all()


def test_nan_in_a_key_reaches_only_rows_that_see_it(kernels: Kernels) -> None:
    case = CASES["verify"]
    inputs = make_inputs(case)
    inputs.keys[3][297] = float("nan")  # queries 0 and 1 of the last sequence end before it
    out = kernels.attend(inputs.q, fill_pool(kernels, case, inputs), inputs.batch, 0.1)
    bad = torch.isnan(out).flatten(1).any(1)
    assert bad.tolist() == [False] * (len(inputs.q) - 3) + [True] * 3


def test_nan_in_a_value_reaches_only_rows_that_see_it(kernels: Kernels) -> None:
    case = CASES["verify"]
    inputs = make_inputs(case)
    inputs.values[3][298] = float("inf")
    out = kernels.attend(inputs.q, fill_pool(kernels, case, inputs), inputs.batch, 0.1)
    bad = ~torch.isfinite(out).flatten(1).all(1)
    assert bad.tolist() == [False] * (len(inputs.q) - 2) + [True] * 2


@pytest.mark.parametrize("kernels", ["torch", "triton"], indirect=True)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_flash_attention_reads_holds_finite_values(kernels: Kernels, bad: float) -> None:
    """Also where nobody is to see them; the key then says that the value was not."""
    layer, slots, angles = kernels.pool(1, 2, 8, 3, 24, torch.float32, CPU)[0], torch.tensor([3, 9]), torch.ones(2, 12)
    q, k, v = torch.ones(2, 3, 24), torch.ones(2, 3, 24), torch.ones(2, 3, 24)
    v[1, 2, 23] = bad
    for write in (kernels.write, lambda *args: kernels.rope_write(q, *args, angles, angles)):
        layer.k.zero_()
        layer.v.fill_(7.0)
        write(k, v, layer, slots)
        values, keys = (pages.flatten(0, 1)[slots] for pages in (layer.v, layer.k))
        assert torch.equal(values, v.nan_to_num(0.0, 0.0, 0.0))
        assert keys.isnan().flatten(1).sum(1).tolist() == [0, 24]
        assert keys[1, 2].isnan().all()


def test_torch_backend_runs_in_half_precision() -> None:
    kernels, case = TorchKernels(), CASES["verify"]
    inputs = make_inputs(case)
    layer = kernels.pool(1, 200, case.page_size, case.kv_heads, case.dim, torch.bfloat16, CPU)[0]
    for table, k, v in zip(inputs.batch.pages, inputs.keys, inputs.values, strict=True):
        kernels.write(k.bfloat16(), v.bfloat16(), layer, slots_of(table, range(len(k)), case.page_size))
    out = kernels.attend(inputs.q.bfloat16(), layer, inputs.batch, case.dim**-0.5)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), oracle(case, inputs), rtol=0, atol=0.03)

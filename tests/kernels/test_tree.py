"""Draft trees in attention: every node is computed as the end of a chain of its ancestors, and becomes one."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from verdraft.kernels.base import Batch, Kernels, LayerKV
from verdraft.kernels.torch_ref import TorchKernels
from verdraft.kernels.tree import paths

HEADS, KV_HEADS, DIM = 6, 2, 40
BINARY = [-1, 0, 0, 1, 1, 2, 2, 3, 4, 6]
FOREST = [-1, -1, 1, -1, 2, 0, 4, 3]
PROMPT_AND_TREE = [*range(-1, 29), 29, 29, 30, 31, 31, 33, 34, 36, 37]
WIDE = [-1, *[0] * 30, *range(1, 31)]
CHAIN = list(range(-1, 12))


def test_paths_lead_from_the_root() -> None:
    assert paths([-1, 0, 1, 1, 2, -1]) == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 2, 4], [5]]
    assert paths([]) == []


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-2]])
def test_a_parent_comes_first(parents: list[int]) -> None:
    with pytest.raises(AssertionError, match="expected an earlier node"):
        paths(parents)


@dataclass(frozen=True, slots=True)
class Pass:
    """Sequences with `before` tokens and a tree of queries each, in scattered pages among NaN."""

    kernels: Kernels
    page_size: int
    before: tuple[int, ...]
    trees: tuple[list[int], ...]

    def data(self, sequence: int) -> tuple[Tensor, Tensor, Tensor]:
        """Its keys and values, in the order of their places, and its queries."""
        random = torch.Generator().manual_seed(sequence)
        count = self.before[sequence] + len(self.trees[sequence])
        k, v = torch.randn(2, count, KV_HEADS, DIM, generator=random)
        return k, v, torch.randn(len(self.trees[sequence]), HEADS, DIM, generator=random)

    def batch(self) -> Batch:
        q_len = torch.tensor([0, *(len(tree) for tree in self.trees)])
        seq_lens = [before + len(tree) for before, tree in zip(self.before, self.trees, strict=True)]
        width = -(-max(seq_lens) // self.page_size)
        order = torch.randperm(width * len(seq_lens), generator=torch.Generator().manual_seed(5))
        pages = order.int().view(len(seq_lens), width)
        depths = [len(path) - 1 for tree in self.trees for path in paths(tree)]
        starts = torch.tensor(self.before).repeat_interleave(q_len[1:])
        places = [torch.arange(before, end) for before, end in zip(self.before, seq_lens, strict=True)]
        return Batch(
            cu_q=q_len.cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            pages=pages,
            slots=torch.cat([self.slots(pages[b], place) for b, place in enumerate(places)]),
            positions=starts + torch.tensor(depths),
            max_q=int(q_len.max()),
            max_k=max(seq_lens),
            parents=torch.tensor([parent for tree in self.trees for parent in tree], dtype=torch.int32),
        )

    def slots(self, table: Tensor, places: Tensor) -> Tensor:
        return table[places // self.page_size].long() * self.page_size + places % self.page_size

    def layer(self, batch: Batch) -> LayerKV:
        shape = (batch.pages.numel(), self.page_size, KV_HEADS, DIM)
        layer = self.kernels.pool(1, *shape, torch.float32, torch.device("cpu"))[0]
        layer.k.fill_(float("nan"))
        layer.v.fill_(float("nan"))
        for b, table in enumerate(batch.pages):
            k, v, _ = self.data(b)
            self.kernels.write(k, v, layer, self.slots(table, torch.arange(len(k))))
        return layer

    def run(self) -> Tensor:
        batch = self.batch()
        queries = torch.cat([self.data(b)[2] for b in range(len(self.trees))])
        return self.kernels.attend(queries, self.layer(batch), batch, 0.2)

    def node_alone(self, sequence: int, path: list[int]) -> Tensor:
        """What the last of the path gets when nothing but the path follows the tokens before."""
        k, v, q = self.data(sequence)
        before = self.before[sequence]
        places = [*range(before), *(before + node for node in path)]
        length = len(places)
        pages = torch.arange(-(-length // self.page_size), dtype=torch.int32).flip(0)[None]
        layer = self.kernels.pool(1, pages.numel(), self.page_size, KV_HEADS, DIM, torch.float32, torch.device("cpu"))[
            0
        ]
        slots = self.slots(pages[0], torch.arange(length))
        self.kernels.write(k[places], v[places], layer, slots)
        batch = Batch(
            cu_q=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([length], dtype=torch.int32),
            pages=pages,
            slots=slots[-1:],
            positions=torch.tensor([length - 1]),
            max_q=1,
            max_k=length,
        )
        return self.kernels.attend(q[path[-1:]], layer, batch, 0.2)


PASSES = {
    "at once": (16, (0, 5), (BINARY, FOREST)),
    "page edges": (16, (15, 16, 17, 31), (BINARY, FOREST, CHAIN, [-1])),
    "block edges": (16, (120, 127, 128, 250), (BINARY, WIDE, FOREST, BINARY)),
    "after a prompt": (16, (97,), (PROMPT_AND_TREE,)),
    "pages of 20": (20, (130, 7), (WIDE, BINARY)),
    "pages of 1": (1, (21,), (FOREST,)),
    "pages of 256": (256, (250, 3), (BINARY, FOREST)),
}


def make_pass(kernels: Kernels, name: str) -> Pass:
    return Pass(kernels, *PASSES[name])


@pytest.mark.parametrize("name", PASSES)
def test_a_node_is_the_end_of_its_path(kernels: Kernels, name: str) -> None:
    """Bit for bit on the exact backends, so that a token from a tree is the token that plain decoding gives."""
    tree = make_pass(kernels, name)
    out = tree.run()
    alone = tree if kernels.exact else make_pass(TorchKernels(), name)
    expected = torch.cat([alone.node_alone(b, path) for b, parents in enumerate(tree.trees) for path in paths(parents)])
    if kernels.exact:
        assert torch.equal(out, expected)
    else:
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("before", [0, 100, 127])
def test_a_chain_that_is_called_a_tree_changes_nothing(kernels: Kernels, before: int) -> None:
    chain = Pass(kernels, 16, (before,), (CHAIN,))
    batch = chain.batch()
    layer, (_, _, q) = chain.layer(batch), chain.data(0)
    plain = Batch(batch.cu_q, batch.seq_lens, batch.pages, batch.slots, batch.positions, batch.max_q, batch.max_k)
    assert torch.equal(kernels.attend(q, layer, batch, 0.2), kernels.attend(q, layer, plain, 0.2))


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # NumPy's, for sums that nobody takes
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("parents", [BINARY, CHAIN], ids=["tree", "chain"])
def test_a_damaged_node_reaches_only_its_descendants(kernels: Kernels, parents: list[int], bad: float) -> None:
    tree = Pass(kernels, 16, (100,), (parents,))
    batch, (k, v, q) = tree.batch(), tree.data(0)
    layer = tree.layer(batch)
    kernels.write(k[102:103], v[102:103] * 0 + bad, layer, batch.slots[2:3])
    out = kernels.attend(q, layer, batch, 0.2)
    found = [not row.isfinite().all() for row in out]
    assert found == [2 in path for path in paths(parents)]


def test_threads_change_nothing(exact: Kernels) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = make_pass(exact, "block edges").run()
        torch.set_num_threads(2)
        assert torch.equal(make_pass(exact, "block edges").run(), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("page_size", "before"), [(16, 14), (20, 119), (1, 3)])
def test_an_accepted_path_moves_to_its_places(kernels: Kernels, page_size: int, before: int) -> None:
    """Afterwards the next token, a plain one, sees a plain context."""
    tree = Pass(kernels, page_size, (before,), (BINARY,))
    batch, path = tree.batch(), [0, 2, 6, 9]
    layer, (_, _, q) = tree.layer(batch), tree.data(0)
    expected = tree.node_alone(0, path)
    places = torch.arange(before, before + len(path))
    kernels.move(layer, batch.slots[path], tree.slots(batch.pages[0], places))
    length = before + len(path)
    after = replace(
        batch,
        cu_q=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        parents=torch.empty(0, dtype=torch.int32),
    )
    assert torch.equal(kernels.attend(q[[9]], layer, after, 0.2), expected)


def test_slots_may_trade_places(kernels: Kernels) -> None:
    layer = kernels.pool(1, 2, 4, KV_HEADS, DIM, torch.float32, torch.device("cpu"))[0]
    k, v = torch.randn(2, 3, KV_HEADS, DIM)
    kernels.write(k, v, layer, torch.tensor([1, 2, 6]))
    moved = kernels.pool(1, 2, 4, KV_HEADS, DIM, torch.float32, torch.device("cpu"))[0]
    kernels.write(k[[2, 0, 1]], v[[2, 0, 1]], moved, torch.tensor([1, 2, 6]))
    kernels.move(layer, torch.tensor([6, 1, 2]), torch.tensor([1, 2, 6]))
    kernels.move(layer, torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert torch.equal(layer.k, moved.k)
    assert torch.equal(layer.v, moved.v)

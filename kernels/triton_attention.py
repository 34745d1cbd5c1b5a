"""Ragged paged attention as one Triton kernel: any page size, query groups, chains and trees. Knows no layer.

A row's result cannot depend on its neighbours: its keys are folded in tiles that start at fixed positions, in ascending
order, by one tile shape for every query length, and a masked key adds nothing to any sum. For the same reason the keys
are never split among programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from verdraft.kernels.base import Batch
from verdraft.kernels.torch_ref import TorchKV

_LOG2E = 1.4426950408889634
_ROWS = 64  # (query, head) pairs of one program: what a warp group's matrix product takes at least
_KEYS, _WIDE_KEYS = 64, 32  # keys of a tile, for types of 2 and of 4 bytes
_OWNERS = 64  # rows of a batch that one compiled kernel serves: to compile takes seconds


def attend(q: Tensor, layer_kv: TorchKV, batch: Batch, scale: float) -> Tensor:
    """As Kernels.attend: q [T, heads, dim] over the pages; returns [T, heads, dim]."""
    tokens, heads, dim = q.shape
    _, page_size, kv_heads, _ = layer_kv.k.shape
    assert q.stride(2) == 1, "q: expected heads that are contiguous inside"
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    tree = batch.parents.shape[0] > 0
    num_rows, group = batch.seq_lens.shape[0], heads // kv_heads
    block_m = max(_ROWS, triton.next_power_of_2(group))
    grid = (tokens // (block_m // group) + num_rows, kv_heads)
    if tokens:
        _attend[grid](
            q,
            layer_kv.k,
            layer_kv.v,
            out,
            batch.cu_q,
            batch.seq_lens,
            batch.pages,
            batch.positions,
            batch.parents if tree else batch.positions,
            scale * _LOG2E,
            num_rows,
            q.stride(0),
            q.stride(1),
            batch.pages.stride(0),
            ROWS=max(_OWNERS, triton.next_power_of_2(num_rows)),
            GROUP=group,
            KV_HEADS=kv_heads,
            DIM=dim,
            WIDTH=max(16, triton.next_power_of_2(dim)),
            PAGE=page_size,
            BLOCK_M=block_m,
            BLOCK_K=_KEYS if q.dtype.itemsize == 2 else _WIDE_KEYS,
            TREE=tree,
            enable_fp_fusion=False,  # two instances of one line must not round differently
        )
    return out


# Not specialised for the size of the batch: one compiled kernel for every pass of a model.
@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def _attend(
    q, k, v, out, cu_q, seq_lens, pages, positions, parents, scale, num_rows, q_stride, head_stride, table_stride,
    ROWS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """One program: the queries first to first + BLOCK_Q - 1 of one row of the batch, all heads of one KV head."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    row, first = _block_of(cu_q, num_rows, tl.program_id(0), ROWS, BLOCK_Q)
    begin = tl.load(cu_q + row)
    q_len = tl.load(cu_q + row + 1) - begin
    if first < q_len:
        kv_head, k_len = tl.program_id(1), tl.load(seq_lens + row)
        before, last = k_len - q_len, tl.minimum(first + BLOCK_Q, q_len) - 1
        lane, dim = tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
        query = tl.minimum(first + lane // GROUP, last)  # lanes too many repeat the last query
        place = before + query
        position = tl.load(positions + begin + query).to(tl.int32) if TREE else place
        at = (begin + query).to(tl.int64) * q_stride + (kv_head * GROUP + lane % GROUP) * head_stride
        rows = tl.load(q + at[:, None] + dim[None, :], mask=dim[None, :] < DIM, other=0.0)
        table, head = pages + row * table_stride, kv_head * DIM
        top = tl.full([BLOCK_M], -1e30, tl.float32)  # finite, so that no difference is NaN
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)

        shared = before + last + 1  # keys that lie at their positions for all queries here
        if TREE and tl.max((position != place).to(tl.int32)) > 0:
            shared = before // BLOCK_K * BLOCK_K
        for start in range(0, shared, BLOCK_K):
            key = start + tl.arange(0, BLOCK_K)
            keys, values = _load_tile(k, v, table, key, key < k_len, head, KV_HEADS, DIM, WIDTH, PAGE)
            seen = key[None, :] <= position[:, None]
            top, total, acc = _fold(rows, keys, values, seen, scale, top, total, acc)

        if TREE and shared <= before:
            # Each query on its own, its ancestors' keys put at their positions: the sums of the chain that they are.
            for leaf in range(first, last + 1):
                mine, end = query == leaf, tl.load(positions + begin + leaf).to(tl.int32) + 1
                for start in range(shared, end, BLOCK_K):
                    key = start + tl.arange(0, BLOCK_K)
                    where = _path_places(positions + begin, parents + begin, leaf, before, key)
                    keys, values = _load_tile(k, v, table, where, key < end, head, KV_HEADS, DIM, WIDTH, PAGE)
                    seen = mine[:, None] & (key[None, :] < end)
                    new_top, new_total, new_acc = _fold(rows, keys, values, seen, scale, top, total, acc)
                    top = tl.where(mine, new_top, top)
                    total = tl.where(mine, new_total, total)
                    acc = tl.where(mine[:, None], new_acc, acc)

        to = ((begin + query).to(tl.int64) * KV_HEADS * GROUP + kv_head * GROUP + lane % GROUP) * DIM
        real = (lane < BLOCK_Q * GROUP) & (first + lane // GROUP <= last)
        tl.store(out + to[:, None] + dim[None, :], acc / total[:, None], mask=real[:, None] & (dim[None, :] < DIM))


@triton.jit
def _block_of(cu_q, num_rows, block, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The batch row that owns a block of queries, and the block's first query in it. Row b's blocks start at
    cu_q[b] // BLOCK_Q + b, which leaves each row at least as many as it needs."""
    row = tl.arange(0, ROWS)
    starts = tl.load(cu_q + row, mask=row < num_rows, other=1 << 30) // BLOCK_Q + row
    owner = tl.sum((starts <= block).to(tl.int32)) - 1
    return owner, (block - tl.load(cu_q + owner) // BLOCK_Q - owner) * BLOCK_Q


@triton.jit
def _load_tile(
    k, v, table, place, wanted, head, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr
):
    """Keys and values [BLOCK_K, WIDTH] at places of the context; zero where not wanted, whatever lies there."""
    dim = tl.arange(0, WIDTH)
    page = tl.load(table + place // PAGE, mask=wanted, other=0).to(tl.int64)
    slot = page * PAGE + place % PAGE
    at = slot[:, None] * (KV_HEADS * DIM) + head + dim[None, :]
    inside = wanted[:, None] & (dim[None, :] < DIM)
    return tl.load(k + at, mask=inside, other=0.0), tl.load(v + at, mask=inside, other=0.0)


@triton.jit
def _fold(q, k, v, seen, scale, top, total, acc):
    """One tile of keys into the running softmax (Dao 2023, algorithm 1). Values are finite (TorchKernels.write), so
    that a weight of 0 adds nothing."""
    scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_top, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def _path_places(positions, parents, leaf, before, key):
    """Where the keys at the positions `key` lie for a node of a tree: walk up until a node's place is its position,
    since then so are all its ancestors'."""
    where, node = key, leaf
    position = tl.load(positions + node).to(tl.int32)
    while position != before + node:
        where = tl.where(key == position, before + node, where)
        node = tl.load(parents + node)
        position = tl.load(positions + node, mask=node >= 0, other=before - 1).to(tl.int32)
    return where

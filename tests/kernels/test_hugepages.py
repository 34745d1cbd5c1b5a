"""Tensors that share slabs of memory stay apart, whatever their sizes."""

import gc

import torch

from verdraft.kernels.hugepages import HugePages


def test_tensors_are_zero_aligned_and_apart() -> None:
    pages = HugePages()
    tensors = [pages.zeros(n, 7) for n in range(1, 40)]
    for i, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()
        tensor.fill_(i + 1)
    assert all(bool((tensor == i + 1).all()) for i, tensor in enumerate(tensors))


def test_a_tensor_larger_than_a_slab_and_one_of_nothing() -> None:
    pages = HugePages()
    large, empty, small = pages.zeros(3, 6 << 20), pages.zeros(0, 5), pages.zeros(4)
    large[2, -1] = 1
    assert large.sum() == 1
    assert empty.shape == (0, 5)
    assert not small.any()


def test_a_tensor_outlives_its_neighbours_and_their_source() -> None:
    pages = HugePages()
    kept, dropped = pages.zeros(100).fill_(3), pages.zeros(100)
    del pages, dropped
    gc.collect()
    assert torch.equal(kept, torch.full((100,), 3.0))

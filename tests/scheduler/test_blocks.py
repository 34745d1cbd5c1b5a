"""The block pool under random use: no block is lost, shared ones survive their first holder."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verdraft.scheduler.blocks import BlockPool, chain_key, root_key


def test_match_returns_the_longest_cached_prefix_and_holds_it():
    pool = BlockPool(4)
    keys = [bytes([i]) for i in range(3)]
    blocks = pool.allocate(2)
    for block, key in zip(blocks, keys, strict=False):
        pool.remember(block, key)
    pool.release(blocks)
    assert pool.num_held == 0
    assert pool.num_cached == 2
    assert pool.match(keys) == blocks
    assert pool.num_held == 2
    pool.check_integrity([blocks])


def test_eviction_takes_the_tail_of_the_oldest_sequence_first():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.remember(blocks[0], b"head")
    pool.remember(blocks[1], b"tail")
    pool.release(blocks)
    pool.allocate(1)
    assert pool.match([b"head"]) == [blocks[0]]
    assert pool.match([b"tail"]) == []


def test_forgotten_blocks_serve_nobody():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.remember(blocks[0], b"key")
    assert pool.match([b"key"]) == blocks[:1]
    pool.forget(blocks)
    pool.release(blocks[:1])
    pool.release(blocks)
    assert pool.match([b"key"]) == []
    assert pool.num_available == 2


def test_integrity_check_sees_a_lost_block():
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="reference counts"):
        pool.check_integrity([])


def test_keys_depend_on_salt_history_and_tokens():
    keys = {
        chain_key(root_key(""), [1, 2]),
        chain_key(root_key("a"), [1, 2]),
        chain_key(root_key(""), [2, 1]),
        chain_key(chain_key(root_key(""), [1, 2]), [1, 2]),
    }
    assert len(keys) == 4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["start", "grow", "stop", "clear", "forget"]), st.integers(0, 5)), max_size=80)
)
def test_any_use_keeps_every_block_accounted_for(actions):
    pool = BlockPool(12)
    live: list[tuple[list[int], list[bytes]]] = []
    for action, number in actions:
        if action == "start":
            keys = [bytes([number, i]) for i in range(3)]
            live.append((pool.match(keys), keys))
        elif action == "grow" and live and pool.num_available:
            blocks, keys = live[number % len(live)]
            blocks += pool.allocate(1)
            if len(blocks) <= len(keys):
                pool.remember(blocks[-1], keys[len(blocks) - 1])
        elif action == "stop" and live:
            pool.release(live.pop(number % len(live))[0])
        elif action == "clear":
            pool.clear_cache()
        elif action == "forget" and live:
            pool.forget(live[number % len(live)][0])
        pool.check_integrity([blocks for blocks, _ in live])

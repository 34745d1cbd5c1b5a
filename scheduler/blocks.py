"""The KV pool's blocks: who holds which, and which finished ones can serve a later prompt. Knows ids and hashes only.

A block is free (no holder, no content worth keeping), held (one or more holders) or idle (no holder, but cached:
it serves a matching prefix until it is evicted, least recently used first).
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np


def root_key(salt: str) -> bytes:
    """Where a chain of block keys starts; a salt keeps tenants apart."""
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"verdraft").digest()


def chain_key(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block: its tokens and everything before them. Cryptographic, so nobody can aim for a collision."""
    return hashlib.blake2b(np.asarray(tokens, dtype=np.int32).tobytes(), digest_size=16, key=previous).digest()


class BlockPool:
    """Reference counts, free list and prefix cache of `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Blocks that allocate() can hand out now."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        """Blocks referenced by live sequences."""
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        """Blocks whose content a later prompt can reuse, held or idle."""
        return len(self._key_of)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; the caller has checked num_available."""
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        block = self._free.pop() if self._free else self._evict()
        self._refs[block] = 1
        return block

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The cached blocks of the longest prefix of `keys`, each with one more reference."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            self._idle.pop(block, None)
            self._refs[block] += 1
            blocks.append(block)
        return blocks

    def remember(self, block: int, key: bytes) -> None:
        """Every token of a held block is committed: later prompts may share it. The first block of a key stays."""
        assert self._refs[block] > 0
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget(self, blocks: Sequence[int]) -> None:
        """Nobody new may share these held blocks: their content is not to be trusted."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference each. Later blocks of a sequence are evicted before earlier ones."""
        for block in reversed(blocks):
            assert self._refs[block] > 0
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def clear_cache(self) -> None:
        """Forget every cached prefix; held blocks stay with their holders."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._block_of.clear()
        self._key_of.clear()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise RuntimeError unless `tables` (of all live sequences) explain every reference and no block is lost."""
        held = Counter(block for table in tables for block in table)
        if any(self._refs[block] != held[block] for block in range(self.num_blocks)):
            raise RuntimeError("reference counts differ from the block tables")
        everywhere = [*self._free, *self._idle, *held]
        if sorted(everywhere) != list(range(self.num_blocks)):
            raise RuntimeError("a block is lost or in two places")
        if {key: block for block, key in self._key_of.items()} != self._block_of:
            raise RuntimeError("the prefix cache's two maps differ")
        if not set(self._idle) <= set(self._key_of):
            raise RuntimeError("an idle block has no key")

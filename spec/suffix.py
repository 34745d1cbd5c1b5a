"""The suffix source (DESIGN section 5): drafts from what the sequence, or an earlier answer, said after the same
context. Knows tokens and sequences; which sequences may share a store is the caller's decision."""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from verdraft.spec.draft import EMPTY, Draft
from verdraft.spec.suffix_index import SuffixIndex
from verdraft.spec.suffix_memory import SEPARATOR, Proposing

TAIL_LEN = 32  # prompt tokens kept before a shared output, so that it is found from its first token on
SHARED = Proposing(levels=(2, 4, 8, 16))  # one equal token in somebody else's answer means nothing
MAX_TENANTS = 32  # salts with a store of their own; the one unused for longest gives way


@dataclass(frozen=True, slots=True)
class StoredOutputs:
    """The whole sequences of a store, the oldest first."""

    tokens: NDArray[np.int32]  # [N] of all of them
    lengths: NDArray[np.int64]  # [S, 2] tokens of each: context before its output, output


class SharedSuffixStore:
    """Outputs of finished sequences of one tenant; the oldest tokens go first. Prompts are never proposed.

    One thread adds and proposes; others may read what is stored.
    """

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens` bounds the memory: about 50 bytes a token, allocated as it is used."""
        self._index = SuffixIndex(max_tokens, SHARED)
        self._max_tokens = max_tokens
        self._lengths: deque[tuple[int, int]] = deque()  # of the sequences that are stored as a whole
        self._taken = 0  # tokens of theirs, with one more for each, which ends it
        self._lock = Lock()

    def add(self, prompt_tail: Sequence[int], output: Sequence[int]) -> None:
        """Remember `output`; the last tokens of `prompt_tail` are context for its beginning and nothing more."""
        if not output:
            return
        tail = prompt_tail[-TAIL_LEN:]
        with self._lock:
            self._index.extend(tail[:-1], findable=False)
            self._index.extend(tail[-1:])
            self._index.extend(output)
            self._index.end_sequence()
            self._note(len(tail), len(output))

    def _note(self, tail: int, output: int) -> None:
        self._lengths.append((tail, output))
        self._taken += tail + output + 1
        while self._taken > self._max_tokens:
            self._taken -= sum(self._lengths.popleft()) + 1

    def stored(self) -> StoredOutputs:
        """A copy of what is known; add() makes an equal store of it."""
        with self._lock:
            tokens, lengths = self._index.newest(self._taken), list(self._lengths)
        return StoredOutputs(tokens[tokens != SEPARATOR], np.array(lengths, np.int64).reshape(-1, 2))

    def clue(self, of: SuffixIndex) -> int:
        """How much of the end of `of` ends an earlier output's beginning; see SuffixIndex.clue."""
        return self._index.clue(of)

    def propose(self, of: SuffixIndex, limit: int) -> Draft:
        """What followed the end of `of` in an earlier output, at most `limit` tokens; see SuffixIndex.propose."""
        return self._index.propose(of, limit)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._index.clear()
            self._lengths.clear()
            self._taken = 0

    @property
    def num_tokens(self) -> int:
        """Tokens stored, at most max_tokens."""
        return self._index.num_tokens

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        self._index.check_integrity()
        assert self._taken == sum(map(sum, self._lengths)) + len(self._lengths) <= self.num_tokens


class SuffixStores:
    """A store for everybody without a salt, and one per salt (cache_salt): tenants never see each other's text.

    All salted stores together may hold as many tokens as the open one.
    """

    def __init__(self, max_tokens: int) -> None:
        self._open = SharedSuffixStore(max_tokens)
        self._salted: OrderedDict[str, SharedSuffixStore] = OrderedDict()
        self._tenant_tokens = max(32, max_tokens // MAX_TENANTS)

    def of(self, salt: str) -> SharedSuffixStore:
        """The store of everybody with this salt; "" is no salt."""
        return self.named(hashlib.sha256(salt.encode()).hexdigest() if salt else "")

    def named(self, name: str) -> SharedSuffixStore:
        """The store of this name: a salt's digest, which tells nobody the salt, or "" for no salt."""
        if not name:
            return self._open
        store = self._salted.pop(name, None) or SharedSuffixStore(self._tenant_tokens)
        self._salted[name] = store
        if len(self._salted) > MAX_TENANTS:
            self._salted.popitem(last=False)
        return store

    def all(self) -> dict[str, SharedSuffixStore]:
        """Stores by name; of the salted ones, the one unused for longest comes first."""
        return {"": self._open, **self._salted.copy()}

    def clear(self) -> None:
        """Forget everything; sequences that run keep feeding the store they started with."""
        for store in self.all().values():
            store.clear()
        self._salted.clear()

    @property
    def num_tokens(self) -> int:
        """Tokens stored, all tenants together."""
        return sum(store.num_tokens for store in self.all().values())

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        for store in self.all().values():
            store.check_integrity()


class SuffixDrafter:
    """One sequence's suffix source: its own prompt and output, and a shared store that it reads and, at the end, feeds.

    `store` is None for a sequence that shares with nobody. `local_tokens` bounds the own index.
    """

    def __init__(self, store: SharedSuffixStore | None = None, local_tokens: int = 32768) -> None:
        self._store = store
        self._local_tokens = local_tokens
        self._local: SuffixIndex | None = None
        self._started = False
        self._tail: list[int] = []
        self._output: list[int] = []

    def start(self, prompt: Sequence[int]) -> None:
        if self._started:
            raise RuntimeError("start() was called twice")
        self._started = True
        self._local = SuffixIndex(self._local_tokens)
        self._local.extend(prompt)
        self._tail = list(prompt[-TAIL_LEN:])

    def extend(self, tokens: Sequence[int]) -> None:
        self._running().extend(tokens)
        if self._store is not None:
            self._output.extend(tokens)

    def clue(self) -> int:
        index = self._running()
        local = index.clue(index)
        return local if self._store is None else max(local, self._store.clue(index))

    def propose(self, limit: int) -> Draft:
        index = self._running()
        local = index.propose(index, limit)
        shared = self._store.propose(index, limit) if self._store is not None else EMPTY
        return shared if shared.score > local.score else local

    def stop(self) -> None:
        self._running()
        if self._store is not None:
            self._store.add(self._tail, self._output)
        self._local = None
        self._output = []

    def _running(self) -> SuffixIndex:
        if self._local is None:
            raise RuntimeError("the drafter has stopped" if self._started else "start() was not called")
        return self._local

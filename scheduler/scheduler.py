"""Which sequences run, and what each of them gets of the next step's token budget. Knows no tensor and no clock.

There are no phases: a sequence owes tokens (its own and its draft's, less what is computed), and a step pays some of
that debt. Prefill chunk, decode and verification are this one rule (DESIGN sections 4 and 7).
"""

from array import array
from collections.abc import Iterator
from itertools import pairwise

from verdraft.scheduler.blocks import BlockPool
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.plan import Work
from verdraft.scheduler.sequence import Sequence
from verdraft.spec.draft import EMPTY


class Scheduler:
    """Owns the two queues and the block pool. Ranks (priority, then arrival) decide every conflict."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)
        self.waiting.sort(key=lambda s: s.rank)

    def remove(self, seq: Sequence) -> None:
        """The sequence has ended: its blocks go back, cached ones stay reusable."""
        seq.finished = True
        (self.running if seq in self.running else self.waiting).remove(seq)
        self.pool.release(seq.blocks)
        seq.blocks = array("i")

    def schedule(self) -> list[Work]:
        """Admit what fits, then spend the budget: decodes and their drafts first, prefill chunks with the rest, which
        drafts leave at least half of the budget.

        An empty plan with a running sequence means that it alone has outgrown the pool: the first in rank can take
        the blocks of everybody else.
        """
        self._admit()
        plan: list[Work] = []
        budget = self.config.max_batch_tokens
        decoding = [s for s in self.running if s.decoding and not s.is_full]
        drafts = (budget if len(decoding) == len(self.running) else budget // 2) - len(decoding)
        for seq in decoding:
            if budget > 0 and seq.decoding:  # nobody had to give way to another
                spent = self._plan(plan, seq, 1 + max(0, drafts))
                budget, drafts = budget - spent, drafts - spent + 1
        for seq, share in self._prefill_shares(budget):
            if seq in self.running:
                self._plan(plan, seq, share)
        return plan

    # ---- admission

    def _admit(self) -> None:
        """Move waiting sequences to running in rank order; nobody overtakes one that waits for memory."""
        for seq in list(self.waiting):
            if len(self.running) >= self.config.max_num_seqs:
                return
            if self._waits_for_leader(seq):
                continue
            if not self._fits(seq):
                return
            self._start(seq)

    def _waits_for_leader(self, seq: Sequence) -> bool:
        """Choices of one prompt wait until the first has computed the prefix that they all share."""
        leader = seq.leader
        if leader is None or leader.finished:
            return False
        return leader.num_remembered < (leader.num_prompt - 1) // self.config.block_size

    def _fits(self, seq: Sequence) -> bool:
        """Room for all known tokens beside what the running ones still need for theirs: admission never thrashes."""
        return not self.running or self.num_unpromised >= self.config.blocks_for(len(seq.tokens) + 1)

    @property
    def num_unpromised(self) -> int:
        """Blocks that can be had beside those that the running sequences still need for all they know; less than none
        where one of them will have to give way."""
        promised = sum(self._missing_blocks(s, len(s.tokens)) for s in self.running)
        return self.pool.num_available - promised

    def _start(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        self.running.append(seq)
        self.running.sort(key=lambda s: s.rank)
        seq.request.group.started = True
        self._reuse_prefix(seq)

    def _reuse_prefix(self, seq: Sequence) -> None:
        """Take the cached blocks of the longest known prefix, leaving at least one token to compute."""
        if seq.request.params.prompt_logprobs is None:
            limit = (len(seq.tokens) - 1) // self.config.block_size
            seq.blocks.extend(self.pool.match(seq.block_keys(self.config.block_size, limit)))
            seq.num_remembered = len(seq.blocks)
            self.prefix_queries += limit
            self.prefix_hits += len(seq.blocks)
        reused = len(seq.blocks) * self.config.block_size
        seq.settle(reused)
        if seq.cached_tokens is None:
            seq.cached_tokens = min(reused, seq.num_prompt)

    # ---- the budget

    def _prefill_shares(self, budget: int) -> Iterator[tuple[Sequence, int]]:
        """The first in rank is sure of half the budget, so it never starves; the shortest debts share the other half,
        so a short prompt overtakes a long one; what they leave goes back to the first."""
        owing = [s for s in self.running if not s.decoding]
        if not owing:
            return
        first, others = owing[0], sorted(owing[1:], key=lambda s: s.owed)
        reserve = min(first.owed, -(-budget // 2))
        left = budget - reserve
        for seq in others:
            share = min(seq.owed, left)
            left -= share
            if share:
                yield seq, share
        if reserve + left:
            yield first, reserve + left

    def _plan(self, plan: list[Work], seq: Sequence, budget: int) -> int:
        """Append `seq`'s work of at most `budget` tokens if blocks can be had; returns the tokens spent."""
        start, owed, block_size = seq.computed[-1], seq.owed, self.config.block_size
        known = min(owed, budget)
        draft = seq.draft.trim(budget - known) if known == owed else EMPTY
        if start + known + len(draft.tokens) > len(seq.blocks) * block_size:
            if not self._reserve(seq, start + known, protected=plan):
                return 0
            spare = (len(seq.blocks) + self.pool.num_available) * block_size - start - known
            draft = draft.trim(max(0, spare))  # a draft may use free blocks, never somebody's
            self._grow(seq, start + known + len(draft.tokens))
        num_tokens = known + len(draft.tokens)
        seq.roll_back(start + num_tokens)  # exits may have drafted more
        plan.append(Work(seq, start, num_tokens, draft))
        return num_tokens

    # ---- blocks

    def outgrown(self, seq: Sequence) -> bool:
        """Whether the newest token's KV has no room in the whole pool."""
        return self.config.blocks_for(len(seq.tokens)) > self.config.num_blocks

    def _missing_blocks(self, seq: Sequence, num_tokens: int) -> int:
        return max(0, self.config.blocks_for(num_tokens) - len(seq.blocks))

    def _grow(self, seq: Sequence, num_tokens: int) -> None:
        seq.blocks.extend(self.pool.allocate(self._missing_blocks(seq, num_tokens)))

    def lend(self, seq: Sequence, num_tokens: int) -> int:
        """Free blocks, never somebody's, for up to `num_tokens` tokens; returns how many tokens have room."""
        missing = self._missing_blocks(seq, num_tokens)
        seq.blocks.extend(self.pool.allocate(min(missing, self.pool.num_available)))
        return min(num_tokens, len(seq.blocks) * self.config.block_size)

    def _reserve(self, seq: Sequence, num_tokens: int, protected: list[Work]) -> bool:
        """Make blocks for `num_tokens` available, preempting sequences of lower rank that this step has not planned."""
        while self._missing_blocks(seq, num_tokens) > self.pool.num_available:
            planned = {work.seq.order for work in protected}
            victims = [s for s in self.running if s.rank > seq.rank and s.order not in planned]
            if not victims:
                return False
            self.preempt(victims[-1])
        return True

    def preempt(self, seq: Sequence) -> None:
        """Give the blocks back and wait again; computed prefix blocks stay cached until they are evicted."""
        self.num_preemptions += 1
        self.running.remove(seq)
        self.pool.release(seq.blocks)
        seq.rewind()
        self.add(seq)

    def remember_blocks(self, seq: Sequence) -> None:
        """Offer the blocks that became full of computed, committed tokens to later prompts."""
        full = min(seq.computed[-1], len(seq.tokens)) // self.config.block_size
        if full > seq.num_remembered:
            keys = seq.block_keys(self.config.block_size, full)
            for i in range(seq.num_remembered, full):
                self.pool.remember(seq.blocks[i], keys[i])
            seq.num_remembered = full

    def check_integrity(self) -> None:
        """Raise RuntimeError when blocks and sequences disagree; for tests and idle moments."""
        self.pool.check_integrity([seq.blocks for seq in self.running])
        for seq in self.running:
            if any(a < b for a, b in pairwise(seq.computed)):
                raise RuntimeError("a deeper segment is ahead of a shallower one")
            if [len(b) for b in seq.behind] != [a - b for a, b in pairwise(seq.computed)]:
                raise RuntimeError("hidden states between two segments are lost or left over")
            if self.config.blocks_for(seq.computed[0]) > len(seq.blocks):
                raise RuntimeError("computed tokens without a block")
        if any(seq.blocks or seq.computed[0] for seq in self.waiting):
            raise RuntimeError("a waiting sequence holds blocks")

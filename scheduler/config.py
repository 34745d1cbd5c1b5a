"""The engine's settings, resolved: every number is final here, defaults and limits are the server's business."""

from dataclasses import dataclass
from typing import Final

from verdraft.scheduler.request import Mode, Router

SUFFIX_STORE_TOKENS: Final = 1_000_000  # remembered of finished answers; as many again of all tenants with a salt


@dataclass(frozen=True, slots=True)
class DraftShape:
    """How an EAGLE head drafts (PAPERS 4.4)."""

    depth: int  # tokens in a row
    topk: int  # children of a node, and nodes of a level that have any; 1: a chain
    tokens: int  # in all


CHAIN = DraftShape(depth=4, topk=1, tokens=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes are in tokens unless the name says otherwise."""

    max_model_len: int
    num_blocks: int  # blocks in the KV pool
    block_size: int = 16
    max_num_seqs: int = 16  # sequences decoded together
    max_queue: int = 256  # submissions waiting beyond those
    max_batch_tokens: int = 256  # in one step, decodes, drafts and prefill chunks together; at least two a sequence
    max_draft_len: int = 16
    speculation: Mode = "suffix"  # what "auto" means
    router: Router = "payoff"  # who decides in mode "hybrid" between the sources
    exit_window: int = 4  # N_i: tokens that exits draft in a cycle (PAPERS 2.3)
    exit_round: int = 2  # N_d: of these, tokens between two checks at L_i
    exit_confidence: float = 0.0  # a head that gives its own token less probability stops drafting
    eagle: DraftShape = CHAIN
    suffix_store_tokens: int = SUFFIX_STORE_TOKENS
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def max_context(self) -> int:
        """What one sequence can have, by the model and by the pool; tokens."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    @property
    def max_prompt_len(self) -> int:
        """The longest prompt that leaves room for one token in the context and in the pool."""
        return self.max_context - 1

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` slots."""
        return -(-num_tokens // self.block_size)

"""A request while the engine works on it: its tokens, how far each segment has computed them, its blocks, its draft.

tokens:     prompt ............ output ....... | draft
computed:   <---- KV valid ---->
owed:                           <------------------->   what the next pass takes (DESIGN section 4)

While exits fill a window, the segments differ, and the hidden states between them wait for the next segment:

computed[0] <----------------------------------->|
computed[1] <------------------------------>|....|      behind[0]
computed[2] <------------------>|...........|           behind[1]
"""

import secrets
from array import array
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor

from verdraft.kernels.sampling import TokenHistory
from verdraft.scheduler.blocks import chain_key, root_key
from verdraft.scheduler.boundary import Boundary
from verdraft.scheduler.features import Features
from verdraft.scheduler.guarded import GuardedDrafter
from verdraft.scheduler.outputs import Summary, Timing, TokenLogprobs
from verdraft.scheduler.request import Mode, Request
from verdraft.spec.agreement import Agreement
from verdraft.spec.constraint import UNCONSTRAINED
from verdraft.spec.draft import EMPTY, Draft
from verdraft.spec.hindsight import Hindsight
from verdraft.spec.payback import Payback
from verdraft.spec.window import NO_CYCLE, Cycle

# One step of priority outranks this many seconds of waiting, so that nobody waits for ever.
PRIORITY_SECONDS = 30.0


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one live request. Commit and the scheduler change it, and exits while they draft."""

    request: Request
    order: int  # submission order, the tie-breaker of equal ranks
    drafter: GuardedDrafter
    num_segments: int
    max_len: int  # prompt and output together
    leader: "Sequence | None" = None  # the first choice of the same prompt, whose prefix this one will reuse
    tokens: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    seed: int = field(init=False)
    history: TokenHistory = field(init=False)
    is_plain: bool = field(init=False)  # temperature and noise alone say which token comes, and nobody looks at logits
    computed: list[int] = field(init=False)
    behind: list[Boundary] = field(init=False)
    blocks: "array[int]" = field(default_factory=lambda: array("i"))  # plain numbers, which passes copy at once
    keys: list[bytes] = field(init=False)  # keys[i + 1] is the key of block i; only committed blocks have one
    num_remembered: int = 0
    draft: Draft = EMPTY
    exits: dict[Mode, Agreement] = field(default_factory=dict)  # how exits may draft for it, and what came of it
    cycle: Cycle = NO_CYCLE  # of the latest window
    agreement: Agreement = field(default_factory=Agreement)  # of the full model with such windows
    inner: Agreement = field(default_factory=Agreement)  # of the exit that checks with the one that drafts
    eagle: Payback | None = None  # what an EAGLE head's drafts brought it; None: it does without
    features: Features | None = None  # what an EAGLE head knows of it
    hindsight: Hindsight = field(default_factory=Hindsight)  # what became of suffix drafts
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int | None = None
    is_foreseeable: bool = False  # its passes may be planned before the one before has ended
    finished: bool = False
    fault_fired: bool = False
    scheduled_at: float | None = None
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.num_prompt = len(self.tokens)
        params = self.request.params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.history = TokenHistory(params, self.tokens)
        shaped = params.uses_history or params.logit_bias or params.is_filtered or params.min_tokens
        seen = params.logprobs is not None or params.prompt_logprobs is not None
        self.is_plain = not shaped and not seen and self.request.constraint is UNCONSTRAINED
        self.computed = [0] * self.num_segments
        self.behind = [Boundary() for _ in range(self.num_segments - 1)]
        self.keys = [root_key(self.request.cache_salt)]

    @property
    def rank(self) -> tuple[float, int]:
        """Smaller goes first."""
        return (self.request.arrived + PRIORITY_SECONDS * self.request.priority, self.order)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def owed(self) -> int:
        """Tokens whose KV the full model still lacks, without the draft."""
        return len(self.tokens) - self.computed[-1]

    @property
    def decoding(self) -> bool:
        """Only the newest token is missing, so one pass yields the next."""
        num_tokens = len(self.tokens)
        return num_tokens - self.computed[-1] == 1 and num_tokens > self.num_prompt

    @property
    def is_full(self) -> bool:
        """It has all the tokens that it may get; its end is to be told yet."""
        return len(self.tokens) >= self.max_len

    @property
    def drafts(self) -> bool:
        """Whether any source may ever draft for it."""
        return not self.drafter.is_silent or bool(self.exits) or self.eagle is not None

    @property
    def is_followed(self) -> bool:
        """Whether an EAGLE head wants what the model computes of it."""
        return self.eagle is not None and self.eagle.followed

    def block_keys(self, block_size: int, limit: int) -> list[bytes]:
        """Keys of the first `limit` full blocks of the tokens; computed once per block."""
        while len(self.keys) <= limit:
            start = (len(self.keys) - 1) * block_size
            self.keys.append(chain_key(self.keys[-1], self.tokens[start : start + block_size]))
        return self.keys[1 : limit + 1]

    def push(self, token: int) -> None:
        """One more token counts for penalties and grammar: a committed one, or a drafted one that pop() takes back."""
        self.history.push(token)
        self.request.constraint.push(token)

    def pop(self) -> None:
        """The token pushed last counts no more."""
        self.history.pop()
        self.request.constraint.pop()

    def advance(self, depth: int, end: int, rows: Tensor) -> None:  # [computed[depth - 1] to end, hidden]
        """A pass through the first `depth` segments, not all, has taken every position before `end`."""
        self.computed[:depth] = [end] * depth
        for boundary in self.behind[: depth - 1]:
            boundary.keep(0)
        self.behind[depth - 1].push(rows)

    def settle(self, position: int) -> None:
        """All segments have computed what is before `position`, and nothing else counts."""
        self.computed = [position] * self.num_segments
        for boundary in self.behind:
            boundary.keep(0)

    def roll_back(self, position: int) -> None:
        """Nothing from `position` on is computed any more. No KV moves: it will be written over."""
        if self.computed[0] <= position:
            return
        self.computed = [min(position, computed) for computed in self.computed]
        for boundary, (lower, upper) in zip(self.behind, pairwise(self.computed), strict=True):
            boundary.keep(lower - upper)

    def rewind(self) -> None:
        """Forget all KV: the blocks are gone, everything will be computed again (preemption by recomputation)."""
        self.blocks = array("i")
        self.settle(0)
        self.num_remembered = 0
        self.draft = EMPTY
        self.features = None
        self.prompt_logprobs = []

    def summary(self, now: float) -> Summary:
        timing = Timing(self.request.arrived, self.scheduled_at, self.first_token_at, now)
        return Summary(self.cached_tokens or 0, self.num_output, self.request.stats, timing)

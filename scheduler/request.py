"""One sequence inside the engine: its tokens, its place in the cache, its draft source. One choice of one prompt."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from verdraft.scheduler.outputs import SpecStats
from verdraft.scheduler.params import SamplingParams
from verdraft.spec.constraint import UNCONSTRAINED, Constraint

Mode: TypeAlias = Literal["auto", "off", "suffix", "early_exit", "hispec", "eagle", "hybrid"]
Router: TypeAlias = Literal["payoff", "threshold", "score"]
EXIT_MODES: tuple[Mode, ...] = ("early_exit", "hispec")


class StopCheck(Protocol):
    """Decides whether a committed token ends the sequence (a stop string). Opaque to the engine."""

    def push(self, token: int) -> bool:
        """Called once per committed token in order; True ends the sequence with this token."""
        ...


class NeverStop:
    """No stop string."""

    def push(self, token: int) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to inject (HTTP contract, section 12); only ever set when test hooks are enabled."""

    kind: Literal["raise", "nan", "freeze", "preempt"]
    after_tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Group:
    """What one submission's sequences share: the queue counts it once until any of them starts."""

    started: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """What a caller submits. `noise_key` with the position decides all randomness (DESIGN section 3)."""

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    choice: int = 0  # the sample's number among the n of its prompt
    speculation: Mode = "auto"
    prediction: Sequence[int] = ()
    cache_salt: str = ""
    priority: int = 0
    stop: StopCheck = field(default_factory=NeverStop)
    constraint: Constraint = UNCONSTRAINED
    fault: Fault | None = None
    group: Group = field(default_factory=Group)
    arrived: float = field(default_factory=time.monotonic)
    stats: SpecStats = field(default_factory=SpecStats)

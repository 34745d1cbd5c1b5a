"""How one sequence is sampled. Ids and numbers only: stop strings live in the server, as a StopCheck."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Values must already be valid (the server names the bad field); see CONTRACT section 4 for ranges."""

    max_tokens: int | None = None  # None: all that fits
    temperature: float = 1.0  # 0: argmax, and top_k, top_p, min_p have no effect
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # counts prompt and output
    presence_penalty: float = 0.0  # counts output
    frequency_penalty: float = 0.0  # counts output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    seed: int | None = None  # None: fresh randomness
    logprobs: int | None = None  # None: none; k: the chosen token's and the k most likely
    prompt_logprobs: int | None = None  # the same for every prompt token but the first

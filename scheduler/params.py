"""How one sequence is sampled. Ids and numbers only: stop strings live in the server, as a StopCheck."""

from dataclasses import dataclass

from verdraft.kernels.sampling import LogitParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(LogitParams):
    """Values must already be valid (the server names the bad field); see CONTRACT section 4 for ranges."""

    max_tokens: int | None = None  # None: all that fits
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    seed: int | None = None  # None: fresh randomness
    logprobs: int | None = None  # None: none; k: the chosen token's and the k most likely
    prompt_logprobs: int | None = None  # the same for every prompt token but the first

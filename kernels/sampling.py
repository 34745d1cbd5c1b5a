"""From a row of logits to the token that the law (DESIGN section 3) asks for. Knows no request, no draft."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitParams:
    """What shapes the distribution at one position, applied in the order of the fields after `logit_bias`."""

    repetition_penalty: float = 1.0  # counts prompt and output
    presence_penalty: float = 0.0  # counts output
    frequency_penalty: float = 0.0  # counts output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    temperature: float = 1.0  # 0: argmax, and top_k, top_p, min_p have no effect
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0

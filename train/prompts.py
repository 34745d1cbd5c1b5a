"""What training continues: prompts as ids, with the file that each comes from."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

SHORTEST, LONGEST, LONGEST_HELD = 8, 384, 768  # tokens; long prompts cost more than their continuations bring
HELD_PER_SOURCE = 6


class DataError(Exception):
    """The training data is missing, malformed or too little. One sentence that names the file."""


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """`held_out` ones are only validated on; `asked`: a prompt of an evaluation, no recorded conversation or text."""

    source: str
    ids: tuple[int, ...]
    held_out: bool
    asked: bool


def trained_on(prompts: Sequence[TrainingPrompt]) -> list[TrainingPrompt]:
    """Those to learn from, in their order. Raises DataError when there are none."""
    kept = [p for p in prompts if not p.held_out and SHORTEST <= len(p.ids) <= LONGEST]
    if not kept:
        raise DataError(f"--data holds no prompt of {SHORTEST} to {LONGEST} tokens to train on")
    return kept


def validated_on(prompts: Sequence[TrainingPrompt]) -> list[TrainingPrompt]:
    """Some held-out prompts of each source: of evaluations, or else of whatever there is. Raises DataError."""
    fit = [p for p in prompts if p.held_out and SHORTEST <= len(p.ids) <= LONGEST_HELD]
    seen: Counter[str] = Counter()
    kept = []
    for prompt in [p for p in fit if p.asked] or fit:
        seen[prompt.source] += 1
        if seen[prompt.source] <= HELD_PER_SOURCE:
            kept.append(prompt)
    if not kept:
        raise DataError(f"--data holds no prompt of {SHORTEST} to {LONGEST_HELD} tokens to validate on")
    return kept

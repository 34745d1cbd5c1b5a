"""Small real things for the draft sources: decoding against a known output, and a source that follows a script."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from verdraft.spec.acceptance import verify
from verdraft.spec.draft import ASK, EMPTY, Draft, Drafter


@dataclass
class Decoded:
    """What happened while one output was decoded with drafts."""

    drafts: list[Draft] = field(default_factory=list)
    num_passes: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    rejected_after: list[tuple[int, int]] = field(default_factory=list)  # (output tokens, rejected so far)


def decode(drafter: Drafter, prompt: Sequence[int], output: Sequence[int], limit: int = 16) -> Decoded:
    """Commit `output`, asking `drafter` before every pass, and stop it at the end."""
    result = Decoded()
    drafter.start(prompt)
    done = 0
    while done < len(output):
        draft = drafter.propose(limit)
        assert len(draft.tokens) <= limit
        assert len(draft.probs) == len(draft.tokens)
        rest = [*output[done:], *[-9] * (limit + 1)]  # -9: the sequence is over, nothing is right any more
        kept = [token for token in verify(draft, rest.__getitem__) if token != -9]
        accepted = next((i for i, token in enumerate(draft.tokens) if token != rest[i]), len(draft.tokens))
        drafter.extend(kept)
        done += len(kept)
        result.drafts.append(draft)
        result.num_passes += 1
        result.num_accepted += accepted
        result.num_rejected += len(draft.tokens) - accepted
        result.rejected_after.append((done, result.num_rejected))
    drafter.stop()
    return result


class ScriptedDrafter:
    """Proposes the given drafts one after the other, and notes what it is told."""

    def __init__(self, drafts: Sequence[Draft] = ()) -> None:
        self.drafts = list(drafts)
        self.told: list[object] = []

    def start(self, prompt: Sequence[int]) -> None:
        self.told.append(("start", list(prompt)))

    def extend(self, tokens: Sequence[int]) -> None:
        self.told.append(("extend", list(tokens)))

    def clue(self) -> int:
        return ASK if self.drafts else 0

    def propose(self, limit: int) -> Draft:
        return self.drafts.pop(0).trim(limit) if self.drafts else EMPTY

    def stop(self) -> None:
        self.told.append("stop")


@pytest.fixture(name="decode", scope="session")
def decode_fixture() -> Callable[..., Decoded]:
    return decode


@pytest.fixture
def scripted() -> type[ScriptedDrafter]:
    return ScriptedDrafter

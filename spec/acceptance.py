"""The one acceptance rule (DESIGN section 3): a draft token is kept if and only if it is the law's own token."""

from collections.abc import Callable

from verdraft.spec.draft import Draft


def verify(draft: Draft, target: Callable[[int], int]) -> list[int]:
    """The accepted tokens and one more: recovered at the first mismatch, or bonus after full acceptance.

    `target(j)` is the law's token after draft.tokens[:j]; it is called for j = 0, 1, ... once each, and for nothing
    behind the first mismatch. `draft` must be a chain.
    """
    assert not draft.parents, "only chains are verified here"
    tokens: list[int] = []
    for j, drafted in enumerate(draft.tokens):
        tokens.append(target(j))
        if tokens[-1] != drafted:
            return tokens
    return [*tokens, target(len(draft.tokens))]

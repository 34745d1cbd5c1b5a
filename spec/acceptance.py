"""The one acceptance rule (DESIGN section 3): a draft token is kept if and only if it is the law's own token."""

from collections.abc import Callable

from verdraft.spec.draft import Draft


def verify(draft: Draft, target: Callable[[int], int]) -> list[int]:
    """The accepted tokens and one more: recovered where no child agrees, or bonus after full acceptance.

    `target(i)` is the law's token after node i - 1 and its path, in a chain after draft.tokens[:i]; `target(0)` the one
    after the committed text. It is called along the accepted path alone, once for each node.
    """
    tokens = [target(0)]
    node = draft.child(-1, tokens[0])
    while node is not None:
        tokens.append(target(node + 1))
        node = draft.child(node, tokens[-1])
    return tokens

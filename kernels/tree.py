"""Draft trees as flat parents: who a token's ancestors are. Knows no token and no tensor.

parents  -1  0  1  1  2        0 - 1 - 2 - 4
depth     0  1  2  2  3            \\- 3
"""

from collections.abc import Sequence


def paths(parents: Sequence[int]) -> list[list[int]]:
    """Of every node, its ancestors from the root on and itself. A parent comes before its children; -1: a root.

    A node's position is that of the token before the tree plus the length of its path.
    """
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        assert -1 <= parent < node, f"parents[{node}]: expected an earlier node or -1, got {parent}"
        found.append([*(found[parent] if parent >= 0 else ()), node])
    return found

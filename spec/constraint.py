"""What limits the tokens of one sequence, as a protocol: which may come next, and which must. Knows token ids only."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Mask: TypeAlias = NDArray[np.bool_]


class ConstraintFailed(ValueError):
    """The constraint cannot say what may come next: a limit of its own was reached."""


class Constraint(Protocol):
    """The state of one sequence. A stack: what is tried is pushed and popped again; commit alone pushes for good."""

    @property
    def ended(self) -> bool:
        """Nothing may follow: the sequence ends with the token that was pushed last."""
        ...

    def allows(self, token: int) -> bool:
        """Whether `token` may come next: mask()[token], and much quicker. After the end everything is allowed."""
        ...

    def mask(self) -> Mask | None:
        """[V], True where a token may come next; None: every token may. Raises ConstraintFailed."""
        ...

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """At most how many of `tokens`, one after the other from here, are allowed: cheap, and never too few."""
        ...

    def forced(self) -> Sequence[int]:
        """The tokens that come next, as far as there is only one way on."""
        ...

    def push(self, token: int) -> None:
        """An allowed token came."""
        ...

    def pop(self) -> None:
        """Forget the token that was pushed last."""
        ...


class Unconstrained:
    """Every token may come, and nothing ends."""

    ended = False

    def allows(self, token: int) -> bool:
        return True

    def mask(self) -> Mask | None:
        return None

    def num_allowed(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def forced(self) -> Sequence[int]:
        return ()

    def push(self, token: int) -> None:
        pass

    def pop(self) -> None:
        pass


UNCONSTRAINED = Unconstrained()

"""A grammar as a constraint and as a draft source, around llguidance's matcher. Knows token ids, no JSON, no text."""

from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from verdraft.spec.constraint import Constraint, ConstraintFailed, Mask
from verdraft.spec.draft import ASK, EMPTY, Draft

SURE = 0.99  # of a forced token; only a tokenizer that cuts a text differently in another place makes one wrong


class GrammarConstraint:
    """One sequence's place in a grammar. `matcher` is its own and at the start; end tokens are the matcher's EOS.

    Where there is only one way on, the matcher asks for the tokens into which the tokenizer cuts that text, and for no
    others; so a mask there holds one token. The matcher knows one token more than the model's `vocab_size`.

    A matcher that has reached one of its limits fails for ever, and so do its copies, for they share a lexer. Drafts or
    other sequences may have brought it there. So the last word has a new one, made by `renew`, that sees these tokens
    alone.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, renew: Callable[[], LLMatcher]) -> None:
        self._matcher = matcher
        self._renew = renew
        self._tokens: list[int] = []
        self._vocab_size = vocab_size
        self._bits = allocate_token_bitmask(1, vocab_size + 1)
        self.ended = False
        self._num_behind_end = 0  # pushed by drafts that go too far; commit cuts them off

    def allows(self, token: int) -> bool:
        if self.ended:
            return True
        forced = self._matcher.compute_ff_tokens()
        return token == forced[0] if forced else self._matcher.validate_tokens([token]) == 1

    def mask(self) -> Mask | None:
        if self.ended:
            return None
        if not self._fill():
            self._replay()
            if not self._fill():
                raise ConstraintFailed("the grammar became too complex, or leaves no token")
        bits = np.unpackbits(self._bits.view(np.uint8)[0], count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def _fill(self) -> bool:
        """Whether the matcher knows what may come next."""
        fill_next_token_bitmask(self._matcher, self._bits)
        return not self._matcher.is_error()

    def _replay(self) -> None:
        self._matcher = self._renew()
        self._matcher.consume_tokens(self._tokens)

    def num_allowed(self, tokens: Sequence[int]) -> int:
        return 0 if self.ended else self._matcher.validate_tokens(list(tokens))

    def forced(self) -> Sequence[int]:
        return () if self.ended else self._matcher.compute_ff_tokens()

    def push(self, token: int) -> None:
        """When the matcher refuses (it has reached a limit), the next mask() says so: commit must not fail."""
        if self.ended:
            self._num_behind_end += 1
            return
        self._tokens.append(token)
        if not self._matcher.consume_token(token):
            self._replay()
        self.ended = self._matcher.is_stopped() and not self._matcher.is_error()

    def pop(self) -> None:
        if self._num_behind_end:
            self._num_behind_end -= 1
            return
        self._tokens.pop()
        self._matcher.rollback(1)  # not when it has failed: the next mask() or push() replays then
        self.ended = False


class GrammarDrafter:
    """Proposes what the grammar forces. Commit moves `constraint`; this only reads it."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def start(self, prompt: Sequence[int]) -> None:
        pass

    def extend(self, tokens: Sequence[int]) -> None:
        pass

    def clue(self) -> int:
        return ASK

    def propose(self, limit: int) -> Draft:
        tokens = tuple(self._constraint.forced()[:limit])
        return Draft(tokens, "grammar", tuple(SURE ** (i + 1) for i in range(len(tokens)))) if tokens else EMPTY

    def stop(self) -> None:
        pass

"""What a token's text is at its place in an answer, for the `tokens` and `text_offset` of completion logprobs.

A token can end in the middle of a character. Its text is what it *completes*, so that the texts of an answer join to
the answer and every text stands at its offset. Knows no JSON and no request.
"""

import codecs
from typing import Protocol


class TokenNames(Protocol):
    """What a tokenizer says of single tokens."""

    def token_bytes(self, token: int) -> bytes | None:
        """Its bytes, perhaps not whole characters; None for a special token."""
        ...

    def token_text(self, token: int) -> str:
        """It alone, for people; special tokens written out."""
        ...


class OutputTexts:
    """Walks along an output from `start`, in code points. Special and `invisible` tokens have a name but no room."""

    def __init__(self, tokens: TokenNames, start: int = 0, invisible: frozenset[int] = frozenset()) -> None:
        self._tokens = tokens
        self._invisible = invisible
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = start

    @property
    def offset(self) -> int:
        """Where the next token's text begins."""
        return self._offset

    def text(self, token: int) -> str:
        """What `token` would add here; the place stays."""
        raw = self._tokens.token_bytes(token)
        if raw is None:
            return self._tokens.token_text(token)
        state = self._decoder.getstate()
        text = self._decoder.decode(raw)
        self._decoder.setstate(state)
        return text

    def advance(self, token: int) -> None:
        """Go on behind `token`."""
        raw = None if token in self._invisible else self._tokens.token_bytes(token)
        if raw is not None:
            self._offset += len(self._decoder.decode(raw))


class PromptTexts(OutputTexts):
    """Walks along a prompt that was echoed as `shown`, in which special tokens may be written out."""

    def __init__(self, tokens: TokenNames, shown: str) -> None:
        super().__init__(tokens)
        self._shown = shown

    def text(self, token: int) -> str:
        """As in the output, without a space that the tokenizer put before the first word."""
        text = super().text(token)
        invented = text.startswith(" ") and not self._shown.startswith(" ", self._offset)
        return text[1:] if invented else text

    def advance(self, token: int) -> None:
        """A token of which nothing is shown (BOS before a string prompt) takes no room."""
        text = self.text(token)
        raw = self._tokens.token_bytes(token)
        if raw is not None:
            self._decoder.decode(raw)
        if self._shown.startswith(text, self._offset):
            self._offset += len(text)

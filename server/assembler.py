"""From a sequence's token ids to its text: stop strings, unfinished characters (HTTP contract, section 6).

Knows bytes and stop strings, but no tokenizer and no request. The engine asks one instance whether a token ends the
sequence; the server feeds the same tokens to another one and sends what it returns. Both run the same code, so they
agree on where the text ends.
"""

import codecs
from collections.abc import Callable, Iterable

from verdraft.server.stops import ROOT, StopSet


class TextAssembler:
    """The text is the lossy UTF-8 decode of the tokens' bytes, cut where the winning stop string starts.

    A stop string counts when a token completes it and at least `min_tokens` tokens (this one included) are there.
    An earlier completion is ordinary text, whose tail can still begin a later one. Whatever a later stop could cut off
    is held back, so the cut never lies inside text that was sent.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes | None],
        stops: StopSet,
        min_tokens: int = 0,
        invisible: frozenset[int] = frozenset(),
    ) -> None:
        """`token_bytes` gives None for special tokens; `invisible` are more tokens without text (EOS, stop ids)."""
        self._token_bytes = token_bytes
        self._stops = stops
        self._min_tokens = min_tokens
        self.invisible = invisible
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._state = ROOT
        self._num_tokens = 0
        self._num_chars = 0  # decoded so far
        self._num_sent = 0
        self._cut: int | None = None  # where the text ends, in characters, once a stop string is complete
        self.stop = ""  # that stop string
        self._unsent: list[str] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._cut is not None

    def push(self, token: int) -> bool:
        """Take one token (scheduler.request.StopCheck); True when it completes a stop string. None may follow then."""
        assert self._cut is None, "a token after the stop"
        self._num_tokens += 1
        known = None if token in self.invisible else self._token_bytes(token)
        if known:
            self._append(self._decoder.decode(known))
        return self._cut is not None

    def feed(self, tokens: Iterable[int]) -> str:
        """Take tokens; returns the text that became certain. Tokens after the stop are dropped."""
        for token in tokens:
            if self._cut is not None or self.push(token):
                break
        return self._take(self._num_chars - self._stops.hold_len(self._state))

    def finish(self) -> str:
        """The rest of the text after the last token: what was held back, and one U+FFFD for an unfinished character."""
        if self._cut is None:
            self._append(self._decoder.decode(b"", final=True), searched=False)
        return self._take(self._num_chars)

    def _append(self, text: str, searched: bool = True) -> None:
        self._unsent.append(text)
        if searched and self._stops:
            self._search(text)
        self._num_chars += len(text)

    def _search(self, text: str) -> None:
        """All characters of the token count as one: the earliest start among the stops that end in it wins."""
        counts = self._num_tokens >= self._min_tokens
        for end, char in enumerate(text, self._num_chars + 1):
            self._state = self._stops.step(self._state, char)
            stop = self._stops.match(self._state)
            if counts and stop and (self._cut is None or end - len(stop) <= self._cut):
                self._cut, self.stop = end - len(stop), stop

    def _take(self, end: int) -> str:
        """Characters [num_sent, end) of the text, or up to the cut."""
        text = "".join(self._unsent)
        count = (end if self._cut is None else self._cut) - self._num_sent
        self._num_sent += count
        self._unsent = [] if self._cut is not None else [text[count:]]
        return text[:count]

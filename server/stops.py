"""A set of stop strings as one automaton (Aho-Corasick): one step per character however many and long they are.

Knows text and nothing else. Built once per request; immutable, so all choices and threads share it.
"""

from collections import deque
from collections.abc import Iterable

ROOT = 0


class StopSet:
    """A state is the longest tail of the text that starts a stop string; `ROOT` is the empty tail.

    text   ... t h e   e n d          stops "end.", "ndash"
                       |---|          the state: its depth (3) is how much of the tail must be held back
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [ROOT]
        self._depth = [0]
        self._match = [""]
        for stop in stops:
            self._add(stop)
        self._hold = list(self._depth)
        self._link()

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while char not in self._next[state]:
            if state == ROOT:
                return ROOT
            state = self._fail[state]
        return self._next[state][char]

    def match(self, state: int) -> str:
        """The longest stop string that ends here, i.e. the one that starts earliest; "": none does."""
        return self._match[state]

    def hold_len(self, state: int) -> int:
        """Length of the longest tail that more text could still make a stop string."""
        return self._hold[state]

    def _add(self, stop: str) -> None:
        node = ROOT
        for char in stop:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._fail.append(ROOT)
                self._depth.append(self._depth[node] + 1)
                self._match.append("")
            node = self._next[node][char]
        self._match[node] = stop

    def _link(self) -> None:
        """Breadth first, so that a node's suffixes are finished before it: longest proper suffix, match and hold."""
        queue = deque([ROOT])
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                suffix = ROOT if node == ROOT else self.step(self._fail[node], char)
                self._fail[child] = suffix
                self._match[child] = self._match[child] or self._match[suffix]
                if not self._next[child]:  # a whole stop that none continues: only a suffix of it can still grow
                    self._hold[child] = self._hold[suffix]
                queue.append(child)

"""What the suffix index costs: microseconds per append and per proposal, bytes per token. No model, no server."""

import random
import time
import tracemalloc
from collections.abc import Callable
from typing import TypeVar

from verdraft.spec.suffix_index import SuffixIndex, ending

T = TypeVar("T")
SIZES = (1_000, 8_000, 100_000)
_NUM_SAMPLES = 2_000


def text_like(size: int, rng: random.Random) -> list[int]:
    """Skewed tokens with passages that come again, as prompts and answers have."""
    tokens: list[int] = []
    while len(tokens) < size:
        if tokens and rng.random() < 0.3:
            begin = rng.randrange(len(tokens))
            tokens += tokens[begin : begin + rng.randrange(5, 60)]
        else:
            tokens += [int(rng.paretovariate(0.6)) % 49_000 for _ in range(rng.randrange(5, 40))]
    return tokens[:size]


def microseconds(work: Callable[[T], object], inputs: list[T], count: int) -> float:
    """Time of `work` over all inputs, divided by `count`."""
    begin = time.perf_counter()
    for one in inputs:
        work(one)
    return (time.perf_counter() - begin) / count * 1e6


def measure(size: int) -> str:
    """One line of the table for an index that holds `size` tokens."""
    rng = random.Random(size)
    tokens, more = text_like(size, rng), text_like(_NUM_SAMPLES, rng)
    tracemalloc.start()
    index = SuffixIndex(size)
    index.extend(tokens)
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    bulk = microseconds(SuffixIndex(size).extend, [tokens], size)
    contexts = [ending(tokens[end - 64 : end]) for end in rng.choices(range(64, size), k=_NUM_SAMPLES)]
    clue = microseconds(index.clue, contexts, _NUM_SAMPLES)
    propose = microseconds(lambda context: index.propose(context, 32), contexts, _NUM_SAMPLES)
    single = microseconds(index.extend, [more[i : i + 1] for i in range(_NUM_SAMPLES)], _NUM_SAMPLES)
    return f"{size:>9,} {bulk:>12.2f} {single:>12.2f} {clue:>10.2f} {propose:>12.2f} {num_bytes / size:>12.1f}"


def main() -> None:
    print("   tokens   bulk us/tok  append us    clue us   propose us   bytes/token")
    for size in SIZES:
        print(measure(size))


if __name__ == "__main__":
    main()

"""The index against a search through the whole history, and the C++ against the plain Python."""

import itertools
import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verdraft.spec.draft import EMPTY
from verdraft.spec.suffix_index import NativeSearch, SuffixIndex, best_search, ending
from verdraft.spec.suffix_memory import SEPARATOR, Proposing
from verdraft.spec.suffix_search import Match, PortableSearch

PORTABLE = PortableSearch()
SMALL = Proposing(levels=(1, 2, 4), max_match=8)


def index_of(tokens: Sequence[int], max_tokens: int = 4096, how: Proposing | None = None) -> SuffixIndex:
    index = SuffixIndex(max_tokens, how)
    index.extend(tokens)
    return index


def find(index: SuffixIndex, of: SuffixIndex) -> list[Match]:
    return PORTABLE.find(index.memory, of.memory)


def longest_match(stored: Sequence[int], context: Sequence[int], most: int) -> int:
    """Length of the longest end of `context` that stands in `stored` with something behind it."""
    for length in range(min(most, len(context)), 0, -1):
        tail = list(context[-length:])
        if any(list(stored[i : i + length]) == tail for i in range(len(stored) - length)):
            return length
    return 0


tokens_of_few = st.lists(st.integers(0, 3), max_size=120)


@settings(deadline=None)
@given(tokens_of_few)
def test_matches_are_real_and_as_long_as_they_say(history: list[int]) -> None:
    index = index_of(history, how=SMALL)
    context = history[-8:]
    for match in find(index, index):
        end = len(history) - match.age  # one behind the last matched token
        assert 0 < match.length <= end
        assert history[end - match.length : end] == context[-match.length :]
        at_bound = match.length in (8, end, len(context))
        assert at_bound or history[end - match.length - 1] != context[-match.length - 1]


@settings(deadline=None)
@given(tokens_of_few)
def test_something_is_found_exactly_when_it_is_there(history: list[int]) -> None:
    """Up to the longest level the match is as long as the longest there is."""
    index = index_of(history, how=SMALL)
    found = max((match.length for match in find(index, index)), default=0)
    longest = longest_match(history, history, 8)
    assert found <= longest
    assert max((level for level in SMALL.levels if level <= longest), default=0) <= found


Operation = tuple[str, list[int]]
operations = st.lists(
    st.tuples(st.sampled_from(["extend", "extend", "unfindable", "end"]), st.lists(st.integers(0, 2), max_size=30)),
    max_size=25,
)


def change(index: SuffixIndex, operation: Operation) -> None:
    kind, tokens = operation
    if kind == "end":
        index.end_sequence()
    else:
        index.extend(tokens, findable=kind == "extend")


def test_a_compiler_makes_the_quick_search() -> None:
    assert isinstance(best_search(), NativeSearch)


@settings(deadline=None)
@given(operations, operations, st.sampled_from([SMALL, Proposing(), Proposing(levels=(2, 4, 8), max_candidates=2)]))
def test_both_searches_make_the_same_index_and_find_the_same(
    mine: list[Operation], others: list[Operation], how: Proposing
) -> None:
    native, portable = SuffixIndex(40, how), SuffixIndex(40, how, PORTABLE)
    context, same = SuffixIndex(40), SuffixIndex(40, search=PORTABLE)
    for operation, other in itertools.zip_longest(mine, others, fillvalue=("extend", [1])):
        for index in (native, portable):
            change(index, operation)
        for index in (context, same):
            change(index, other)
        native.check_integrity()
        portable.check_integrity()
        assert native.newest(native.num_tokens).tolist() == portable.newest(portable.num_tokens).tolist()
        for left, right in ((native, portable), (context, same)):
            assert native.clue(left) == portable.clue(right)
            assert native.propose(left, 9) == portable.propose(right, 9)
            assert context.propose(left, 50) == same.propose(right, 50)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**9), st.integers(5, 40))
def test_eviction_soak(seed: int, max_tokens: int) -> None:
    """Only the last max_tokens tokens can be found or proposed, whatever came before; nothing crosses a separator."""
    rng = random.Random(seed)
    index = SuffixIndex(max_tokens, SMALL)
    stored: list[int] = []
    for _ in range(300):
        if rng.random() < 0.1:
            index.end_sequence()
            stored.append(SEPARATOR)
        else:
            token = rng.randrange(3)
            index.extend([token])
            stored.append(token)
        index.check_integrity()
        live = stored[-max_tokens:]
        assert index.num_tokens == len(live)
        context = [rng.randrange(3) for _ in range(6)]
        for match in find(index, ending(context)):
            end = len(live) - match.age
            assert live[end - match.length : end] == context[-match.length :]
        assert SEPARATOR not in index.propose(ending(context), 10).tokens


def test_bulk_soak_over_many_generations() -> None:
    rng = random.Random(3)
    index = SuffixIndex(500, SMALL)
    for _ in range(60):
        index.extend([rng.randrange(50) for _ in range(rng.randrange(1, 1200))])
        index.check_integrity()
        if rng.random() < 0.3:
            index.end_sequence()
    assert index.num_tokens == 500


@pytest.mark.long
def test_a_million_tokens_pass_through() -> None:
    """Twenty times what the index holds: it finds what is in the last 50,000, and takes no more memory than before."""
    rng, size = random.Random(4), 50_000
    index, found = SuffixIndex(size), 0
    stored: list[int] = []
    tracemalloc.start()
    for step in range(20_000):
        begin = rng.randrange(max(1, len(stored) - 20))
        passage = stored[begin : begin + 20] if step % 3 == 0 else [rng.randrange(49_000) for _ in range(20)]
        tokens = [*passage, *(min(int(rng.paretovariate(0.6)), 49_000) for _ in range(rng.randrange(60)))]
        index.extend(tokens[:10])
        index.extend(tokens[10:])
        stored = [*stored, *tokens][-size:]
        context = stored[-64:]
        for match in find(index, index):
            end, found = len(stored) - match.age, found + 1
            assert stored[end - match.length : end] == context[-match.length :]
        if step == 5_000:
            before = tracemalloc.get_traced_memory()[0]
    index.check_integrity()
    assert index.num_tokens == size
    assert found > 10_000
    assert tracemalloc.get_traced_memory()[0] < before + 100_000
    tracemalloc.stop()


@settings(deadline=None)
@given(tokens_of_few, st.integers(-1, 20))
def test_a_draft_is_never_longer_than_asked(history: list[int], limit: int) -> None:
    index = index_of(history, how=SMALL)
    draft = index.propose(index, limit)
    assert len(draft.tokens) <= max(0, limit)
    assert len(draft.probs) == len(draft.tokens)
    assert list(draft.probs) == sorted(draft.probs, reverse=True)
    assert all(SMALL.min_prob <= prob < 1 for prob in draft.probs)
    assert len(draft.tokens) <= SMALL.factor * draft.match_len


def test_a_repetition_is_continued_as_before() -> None:
    passage = list(range(100, 140))
    index = index_of([*passage, 1, 2, 3, *passage[:12]])
    draft = index.propose(index, 12)
    assert draft.tokens == tuple(passage[12:24])
    assert draft.match_len == 12
    assert draft.source == "suffix"


def test_length_grows_with_the_match() -> None:
    passage = list(range(100, 140))
    lengths = []
    for match_len in (2, 4, 10):
        index = index_of([*passage, 1, *passage[:match_len]])
        lengths.append(len(index.propose(index, 64).tokens))
    assert lengths == sorted(set(lengths))


def test_a_period_is_continued_beyond_the_newest_token() -> None:
    index = index_of([9, 8, *[5, 6, 7] * 5])
    assert index.propose(index, 8).tokens == (5, 6, 7, 5, 6, 7, 5, 6)


def test_the_more_frequent_continuation_wins_and_the_recent_one_of_equals() -> None:
    index = index_of([1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 4, 0, 9, 1, 2], how=Proposing(levels=(2,)))
    assert index.propose(ending([1, 2]), 1).tokens == (3,)
    index = index_of([1, 2, 3, 0, 1, 2, 4, 0, 9, 1, 2], how=Proposing(levels=(2,)))
    assert index.propose(ending([1, 2]), 1).tokens == (4,)


def test_the_longest_context_decides() -> None:
    index = index_of([5, 6, 1, 2, 3, 0, 9, 1, 2, 4, 0, 8, 1, 2, 4, 0, 5, 6, 1, 2])
    assert index.propose(index, 1).tokens == (3,)


def test_nothing_is_proposed_from_nothing() -> None:
    assert SuffixIndex(100).propose(ending([1, 2, 3]), 5) == EMPTY
    assert index_of([1, 2, 3]).propose(ending([]), 5) == EMPTY
    assert index_of([1, 2, 3]).propose(ending([7, 8]), 5) == EMPTY


def test_tokens_that_are_not_findable_are_context_only() -> None:
    index = SuffixIndex(100)
    index.extend([1, 2, 3], findable=False)
    index.extend([4, 5, 6])
    index.end_sequence()
    assert index.propose(ending([1, 2]), 5) == EMPTY
    draft = index.propose(ending([1, 2, 3, 4]), 5)
    assert draft.tokens == (5, 6)
    assert draft.match_len == 4


def test_clear_forgets() -> None:
    index = index_of([1, 2, 3, 1, 2])
    index.clear()
    index.check_integrity()
    assert index.num_tokens == 0
    assert index.propose(ending([1, 2]), 5) == EMPTY
    index.extend([1, 2, 3, 1, 2])
    assert index.propose(ending([1, 2]), 1).tokens == (3,)


def test_an_index_must_hold_its_longest_level() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        SuffixIndex(16)


def test_a_clue_says_how_much_context_was_seen_before() -> None:
    index, other = SuffixIndex(4096), SuffixIndex(4096, Proposing(levels=(2, 4)))
    index.extend([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert index.clue(index) == 0
    index.extend([3])
    assert index.clue(index) == 1
    index.extend([4, 5, 6, 7])
    assert index.clue(index) == 4
    assert other.clue(index) == 0
    other.extend([9, 6, 7, 1])
    other.end_sequence()
    assert other.clue(index) == 2


@given(st.lists(st.integers(0, 3), max_size=80))
def test_a_clue_never_promises_what_is_not_found(tokens: list[int]) -> None:
    index = SuffixIndex(500)
    for token in tokens:
        index.extend([token])
        matches = find(index, index)
        assert index.clue(index) <= max((match.length for match in matches), default=0)

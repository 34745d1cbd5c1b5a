"""The shared store and the drafter over both indexes."""

from collections.abc import Callable
from typing import Any

import pytest

from verdraft.spec.draft import EMPTY, Draft
from verdraft.spec.suffix import MAX_TENANTS, SharedSuffixStore, SuffixDrafter, SuffixStores
from verdraft.spec.suffix_index import ending

PROMPT = list(range(200, 260))
ANSWER = list(range(300, 340))


def run(
    decode: Callable[..., Any], store: SharedSuffixStore | None, prompt: list[int], output: list[int]
) -> list[Draft]:
    """The non-empty drafts on the way to `output`."""
    return [draft for draft in decode(SuffixDrafter(store), prompt, output).drafts if draft.tokens]


def test_a_repeated_request_is_drafted_from_its_first_token(decode: Callable[..., Any]) -> None:
    store = SharedSuffixStore(10_000)
    assert run(decode, store, PROMPT, ANSWER) == []
    drafts = run(decode, store, PROMPT, ANSWER)
    assert drafts[0].tokens == tuple(ANSWER[:16])
    assert sum(len(draft.tokens) for draft in drafts) >= len(ANSWER) - len(drafts) - 1
    store.check_integrity()


def test_without_a_store_nothing_is_shared(decode: Callable[..., Any]) -> None:
    store = SharedSuffixStore(10_000)
    run(decode, None, PROMPT, ANSWER)
    assert store.num_tokens == 0
    run(decode, store, PROMPT, ANSWER)
    assert run(decode, None, PROMPT, ANSWER) == []


def test_the_prompt_tail_is_never_proposed() -> None:
    store = SharedSuffixStore(10_000)
    store.add(PROMPT, ANSWER)
    for end in range(1, 32):
        assert store.propose(ending(PROMPT[:-end]), 8) == EMPTY
    assert store.propose(ending(PROMPT), 3).tokens == tuple(ANSWER[:3])


def test_a_proposal_ends_with_the_answer_it_comes_from() -> None:
    store = SharedSuffixStore(10_000)
    store.add(PROMPT, ANSWER)
    store.add([1, 2, 3], [4, 5, 6])
    assert store.propose(ending(ANSWER[:-2]), 20).tokens == tuple(ANSWER[-2:])
    assert store.propose(ending(ANSWER), 20) == EMPTY


def test_an_empty_output_is_not_stored() -> None:
    store = SharedSuffixStore(100)
    store.add(PROMPT, [])
    assert store.num_tokens == 0


def test_the_same_answer_again_and_again_stays_within_the_bound() -> None:
    store = SharedSuffixStore(500)
    for _ in range(50):
        store.add(PROMPT, ANSWER)
        store.check_integrity()
    assert store.num_tokens == 500
    assert store.propose(ending(PROMPT), 5).tokens == tuple(ANSWER[:5])
    store.clear()
    assert store.num_tokens == 0
    assert store.propose(ending(PROMPT), 5) == EMPTY


def test_the_oldest_answer_goes_first() -> None:
    store = SharedSuffixStore(300)
    for i in range(10):
        store.add([i * 1000], list(range(i * 1000 + 1, i * 1000 + 61)))
    assert store.propose(ending([1, 2, 3, 4]), 5) == EMPTY
    assert store.propose(ending([9001, 9002, 9003, 9004]), 2).tokens == (9005, 9006)


def test_the_better_of_local_and_shared_wins_and_ties_are_local() -> None:
    store = SharedSuffixStore(10_000)
    store.add([], [1, 2, 3, 4, 77, 78])
    drafter = SuffixDrafter(store)
    drafter.start([50, 3, 4, 60, 61, 62, 9, 1, 2, 3, 4])
    assert drafter.propose(2).tokens == (77, 78)  # four tokens agree there, two here
    drafter = SuffixDrafter(store)
    drafter.start([1, 2, 3, 4, 60, 61, 9, 1, 2, 3, 4])
    assert drafter.propose(2).tokens == (60, 61)


def test_misuse_raises() -> None:
    drafter = SuffixDrafter()
    for call in (lambda: drafter.propose(3), lambda: drafter.extend([1]), drafter.stop):
        with pytest.raises(RuntimeError, match="start"):
            call()
    drafter.start([1, 2])
    with pytest.raises(RuntimeError, match="twice"):
        drafter.start([1, 2])
    drafter.stop()
    with pytest.raises(RuntimeError, match="stopped"):
        drafter.stop()


def test_tenants_share_a_store_with_nobody_else() -> None:
    stores = SuffixStores(10_000)
    output = list(range(100, 120))
    stores.of("mine").add([1, 2, 3], output)
    mine = stores.of("mine").propose(ending([1, 2, 3, 100, 101]), 8).tokens
    assert mine
    assert mine == tuple(output[2 : 2 + len(mine)])
    assert stores.of("other").propose(ending([1, 2, 3, 100, 101]), 8).tokens == ()
    assert stores.of("").propose(ending([1, 2, 3, 100, 101]), 8).tokens == ()


def test_tenants_are_bounded_and_the_idle_one_gives_way() -> None:
    stores = SuffixStores(10_000)
    for salt in ("kept", "idle"):
        stores.of(salt).add([1], [100, 101, 102, 103])
    for i in range(MAX_TENANTS - 1):
        stores.of(f"new {i}")
        stores.of("kept")
    assert stores.of("kept").num_tokens > 0
    assert stores.of("idle").num_tokens == 0
    stores.check_integrity()
    stores.clear()
    assert stores.num_tokens == 0

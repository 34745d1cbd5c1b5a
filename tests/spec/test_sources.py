"""Which sources a mode gives, and the order in which they are asked."""

from collections.abc import Callable
from typing import Any

from verdraft.spec.draft import EMPTY, Draft, NoDrafter
from verdraft.spec.sources import ChainOfSources, make_drafter
from verdraft.spec.suffix import SharedSuffixStore, SuffixDrafter

TEXT = list(range(60))


def test_the_first_source_with_a_draft_wins_and_all_see_every_token(scripted: type[Any]) -> None:
    first = scripted([EMPTY, Draft((1, 2, 3), "prediction")])
    second = scripted([Draft((7, 8), "suffix"), Draft((9,), "suffix")])
    chain = ChainOfSources([first, second])
    chain.start([5])
    assert chain.propose(4).tokens == (7, 8)
    chain.extend([7])
    assert chain.propose(2) == Draft((1, 2), "prediction")
    chain.stop()
    assert first.told == second.told == [("start", [5]), ("extend", [7]), "stop"]
    assert chain.propose(4).tokens == (9,)
    assert chain.propose(4) == EMPTY


def test_off_drafts_nothing_but_a_prediction() -> None:
    store = SharedSuffixStore(1000)
    assert isinstance(make_drafter("off", store=store), NoDrafter)
    drafter = make_drafter("off", [1, 2, 3], store)
    drafter.start(TEXT)
    draft = drafter.propose(8)
    assert (draft.tokens, draft.source) == ((1, 2, 3), "prediction")
    drafter.extend([7, 8, 9])
    drafter.stop()
    assert store.num_tokens == 0


def test_suffix_without_a_prediction_is_the_suffix_source_alone() -> None:
    assert isinstance(make_drafter("suffix"), SuffixDrafter)


def test_a_prediction_is_tried_before_what_was_said_before(decode: Callable[..., Any]) -> None:
    store = SharedSuffixStore(1000)
    store.add([9, 9], TEXT)
    result = decode(make_drafter("suffix", TEXT[:30], store), [9, 9], TEXT)
    sources = [draft.source for draft in result.drafts if draft.tokens]
    assert sources[0] == "prediction"
    assert "suffix" in sources
    assert sources == sorted(sources)
    assert result.num_accepted > 45

"""Replay of recorded answers: the states of a server, and labels that the record justifies."""

from dataclasses import replace

import numpy as np

from verdraft.spec.features import FEATURES, NO_CLASSES
from verdraft.spec.replay import RecordedAnswer, States, joined, replay
from verdraft.spec.suffix import SharedSuffixStore, SuffixDrafter

PHRASE = tuple(range(10, 22))
COPY = RecordedAnswer("edit", "a", (1, 2, 3, *PHRASE, 4), (9, *PHRASE, 5, 0))


def states_of(*answers: RecordedAnswer, draft_len: int = 64) -> States:
    return replay([answers], NO_CLASSES, draft_len)


def at(states: States, position: int) -> tuple[int, int]:
    """Drafted and accepted there."""
    row = int(np.flatnonzero(states.position == position)[0])
    return int(states.drafted[row]), int(states.accepted[row])


def test_labels_are_matches_with_the_recorded_continuation_at_every_position() -> None:
    states = states_of(COPY)
    drafter = SuffixDrafter(SharedSuffixStore(10_000))
    drafter.start(COPY.prompt)
    drafter.extend(COPY.output[:1])
    for position in range(1, len(COPY.output)):
        draft = drafter.propose(64)
        assert (position in states.position) == bool(draft.tokens)
        if draft.tokens:
            rest = COPY.output[position:]
            right = next((i for i, token in enumerate(draft.tokens) if rest[i : i + 1] != (token,)), len(draft.tokens))
            assert at(states, position) == (len(draft.tokens), right)
        drafter.extend(COPY.output[position : position + 1])
    assert states.accepted.max() >= 4


def test_the_first_token_is_the_prefills() -> None:
    repeated = RecordedAnswer("x", "a", PHRASE + PHRASE[:4], PHRASE[4:])
    assert states_of(repeated).position.min() == 1


def test_earlier_answers_of_a_file_are_shared_and_other_files_are_not() -> None:
    first = RecordedAnswer("x", "a", (1, 2), (7, 8, *PHRASE, 0))
    second = RecordedAnswer("x", "b", (3, 4), (7, 8, *PHRASE, 0))
    assert (states_of(first, second).answer == 1).any()
    apart = replay([[first], [second]], NO_CLASSES)
    assert not (apart.answer == 1).any()


def test_a_cut_text_labels_nothing_that_it_leaves_open() -> None:
    cut = replace(COPY, output=COPY.output[:8], ended=False)
    whole = states_of(replace(cut, ended=True))
    assert (whole.position + whole.accepted == 8).any()
    states = states_of(cut)
    decided = (states.position + states.accepted < 8) | (states.accepted == states.drafted)
    assert decided.all()
    assert 0 < len(states.drafted) < len(whole.drafted)


def test_drafts_are_no_longer_than_asked_for() -> None:
    assert states_of(COPY, draft_len=3).drafted.max() == 3


def test_a_replay_is_deterministic_and_its_seed_changes_the_imitated_router_alone() -> None:
    answers = [replace(COPY, conversation=str(i)) for i in range(6)]
    one, same, other = (replay([answers], NO_CLASSES, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one.features, same.features)
    assert np.array_equal(one.accepted, other.accepted)
    columns = [FEATURES[i] for i in np.flatnonzero((one.features != other.features).any(0))]
    assert "selection_rate" in columns
    assert not {"score", "match_len", "draft_len", "prompt_len", "generated_len"} & set(columns)


def test_joined_replays_keep_their_answers() -> None:
    held = replace(COPY, workload="code", held_out=True)
    both = joined([states_of(COPY), states_of(COPY, held)])
    assert [(a.workload, a.held_out) for a in both.answers] == [("edit", False), ("edit", False), ("code", True)]
    assert set(both.workload[both.held_out]) == {"code"}
    assert both.answer.max() == 2
    assert both.lengths.tolist() == [len(COPY.output)] * 3

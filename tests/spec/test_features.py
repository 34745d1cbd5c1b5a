"""phi, and judging drafts by what was committed later."""

import numpy as np

from verdraft.spec.draft import Draft
from verdraft.spec.features import (
    BRACKET,
    CLASSES,
    DELIMITER,
    DIGIT,
    FEATURES,
    PUNCTUATION,
    WHITESPACE,
    DecodeState,
    RecentHistory,
    classify,
    describe,
)
from verdraft.spec.hindsight import Hindsight

ROW = np.zeros(len(FEATURES), np.float32)


def named(row: np.ndarray) -> dict[str, float]:
    return dict(zip(FEATURES, row.tolist(), strict=True))


def test_classes_come_from_the_bytes_of_a_token() -> None:
    classes = classify([b" word", b"\n", b"(x)", b", ", b"|7", None, b"\xc3"])
    assert classes.tolist() == [
        0,
        WHITESPACE | DELIMITER,
        BRACKET,
        PUNCTUATION | DELIMITER,
        DELIMITER | DIGIT,
        0,
        0,
    ]


def test_features_say_what_is_known_of_draft_state_and_history() -> None:
    history = RecentHistory()
    history.cycle(True)
    history.judge(drafted=5, accepted=5)
    history.judge(drafted=3, accepted=1)
    draft = Draft((0, 1, 1, 2), probs=(0.9, 0.8, 0.5, 0.25), match_len=7)
    row = named(describe([draft], [DecodeState(30, 10, history)], classify([b"(", b"a", b"9"]))[0])
    assert row["score"] == np.float32(2.45)
    assert [round(np.expm1(row[n])) for n in ("match_len", "draft_len", "prompt_len", "generated_len")] == [
        7,
        4,
        30,
        10,
    ]
    assert row["relative_position"] == np.float32(10 / 41)
    assert [row[f"prob_{n}"] for n in (1, 2, 4, 8)] == [np.float32(0.9), np.float32(0.8), 0.25, 0.0]
    assert [round(np.expm1(row[f"accepted_{n}_ago"])) for n in (1, 2, 3)] == [1, 5, 0]
    assert np.isclose(row["selection_rate"], 0.1)
    assert np.isclose(row["kept_whole"], 0.09)
    assert np.isclose(np.expm1(row["mean_accepted"]), 0.1 * 1 + 0.09 * 5)
    assert (row["bracket_share"], row["digit_share"], row["first_bracket"], row["first_digit"]) == (0.25, 0.25, 1, 0)


def test_a_batch_gives_each_draft_its_own_row() -> None:
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 32, 50).astype(np.uint8)
    drafts = [Draft(tuple(rng.integers(0, 60, n).tolist()), probs=(0.5,) * n, match_len=n) for n in (1, 9, 40)]
    states = [DecodeState(10 * n, n, RecentHistory()) for n in range(3)]
    together = describe(drafts, states, classes)
    alone = [describe([d], [s], classes)[0] for d, s in zip(drafts, states, strict=True)]
    assert np.array_equal(together, np.stack(alone))
    assert describe([], []).shape == (0, len(FEATURES))


def test_without_a_table_no_token_has_a_class() -> None:
    row = named(describe([Draft((5, 6), probs=(0.9, 0.8))], [DecodeState(1, 1, RecentHistory())])[0])
    assert not any(row[f"{name}_share"] or row[f"first_{name}"] for name in CLASSES)


def test_hindsight_judges_a_draft_whatever_pieces_the_text_comes_in() -> None:
    text = [1, 2, 3, 4, 5, 6]
    for cut in range(1, 6):
        hindsight = Hindsight()
        hindsight.watch((1, 2, 3, 9, 9), ROW, 2.5)
        judged = hindsight.commit(text[:cut]) + hindsight.commit(text[cut:])
        assert [(s.drafted, s.accepted, s.predicted) for s in judged] == [(5, 3, 2.5)]
        assert hindsight.history.accepted[0] == 3
        assert hindsight.commit([7]) == []


def test_hindsight_waits_until_a_draft_is_decided() -> None:
    hindsight = Hindsight()
    hindsight.watch((1, 2, 3), ROW, 0.0)
    assert hindsight.commit([1]) == []
    hindsight.watch((2, 8), ROW, 0.0)
    assert [(s.drafted, s.accepted) for s in hindsight.commit([2, 3])] == [(3, 3), (2, 1)]
    assert hindsight.history.num_judged == 2


def test_a_drafts_own_end_is_no_mistake() -> None:
    hindsight = Hindsight()
    hindsight.watch((1, 2), ROW, 0.0)
    assert [s.accepted for s in hindsight.commit([1, 2, 3])] == [2]
    assert hindsight.history.kept_whole > 0

"""Every processor against its slow definition, and the law as a whole."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verdraft.kernels.chooser import choose_philox
from verdraft.kernels.native import NativeOps
from verdraft.kernels.noise import Noise, PhiloxBlocks, Words, philox_blocks, to_gumbel
from verdraft.kernels.sampling import (
    AllTokensMasked,
    BadLogits,
    LogitParams,
    Row,
    TokenHistory,
    argmax_rows,
    bad_rows,
    choose_token,
    kept_tokens,
    leading_tokens,
    processed,
    row_logprobs,
)

NONE = TokenHistory(LogitParams())


def row_of(values: Sequence[float]) -> Row:
    return np.array(values, np.float32)


def history_of(params: LogitParams, prompt: Sequence[int], output: Sequence[int]) -> TokenHistory:
    history = TokenHistory(params, prompt)
    for token in output:
        history.push(token)
    return history


def random_row(seed: int, vocab_size: int = 300, spread: float = 3.0) -> Row:
    """Rounded, so that ties happen."""
    values = np.random.default_rng(seed).normal(0, spread, vocab_size)
    return values.round(1).astype(np.float32)


def slow_kept(scores: Sequence[float], params: LogitParams) -> list[int]:
    """The definition: sort by (likelier first, lower id first), cut three times."""
    order = sorted((i for i in range(len(scores)) if scores[i] > -math.inf), key=lambda i: (-scores[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        weights = np.exp(scores).tolist()
        order.sort(key=lambda i: (-weights[i], i))  # scores that differ may weigh the same
        wanted, mass = params.top_p * sum(weights[i] for i in order), 0.0
        for n, i in enumerate(order):
            mass += weights[i]
            if mass >= wanted:
                order = order[: n + 1]
                break
    if params.min_p > 0.0:
        order = [i for i in order if math.exp(scores[i]) >= params.min_p]
    return sorted(order)


def scores_of(row: Row, temperature: float = 1.0) -> np.ndarray:
    return (row.astype(np.float64) - float(row.max())) / temperature


rows = st.builds(random_row, st.integers(0, 10**6), st.sampled_from([1, 2, 7, 300, 2000]), st.sampled_from([0.1, 3.0]))


@settings(deadline=None)
@given(
    rows,
    st.sampled_from([0, 1, 2, 5, 50, 10**6]),
    st.sampled_from([1.0, 0.999, 0.9, 0.51, 0.013, 1e-9]),
    st.sampled_from([0.0, 0.0123, 0.3, 1.0]),
    st.sampled_from([0.31, 1.0, 2.0]),
)
def test_filters_keep_what_the_definition_keeps(
    row: Row, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    params = LogitParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    scores = scores_of(row, temperature)
    tokens, kept_scores = kept_tokens(scores, params)
    assert tokens.tolist() == slow_kept(scores.tolist(), params)
    assert np.array_equal(kept_scores, scores[tokens])


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (LogitParams(), [0, 1, 2, 3]),
        (LogitParams(top_k=2), [1, 2]),  # 2 and 3 are equal: the lower id stays
        (LogitParams(top_p=0.5), [1, 2]),
        (LogitParams(top_p=0.1), [1]),
        (LogitParams(min_p=0.2), [1, 2, 3]),
        (LogitParams(min_p=1.0), [1]),
    ],
)
def test_filters_by_hand(params: LogitParams, kept: list[int]) -> None:
    scores = np.log(np.array([0.05, 0.45, 0.25, 0.25])) - math.log(0.45)
    assert kept_tokens(scores, params)[0].tolist() == kept


def test_of_two_tokens_that_only_float64_tells_apart_one_is_left() -> None:
    scores = np.array([-1e-17, 0.0])
    assert kept_tokens(scores, LogitParams(top_p=0.1, min_p=1.0))[0].size == 1


@settings(deadline=None)
@given(
    rows,
    st.lists(st.integers(0, 299), max_size=30),
    st.lists(st.integers(0, 299), max_size=30),
    st.sampled_from([1.0, 1.3, 0.7]),
    st.sampled_from([0.0, 1.5, -2.0]),
    st.sampled_from([0.0, 0.4, -2.0]),
)
def test_penalties_follow_their_definition(
    row: Row, prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> None:
    prompt = [t % row.size for t in prompt]
    output = [t % row.size for t in output]
    params = LogitParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    expected = [float(x) for x in row]
    for token in set(prompt + output):
        value = expected[token]
        expected[token] = value / repetition if value > 0 else value * repetition
    for token, count in Counter(output).items():
        expected[token] = expected[token] - presence - frequency * count
    assert processed(row, params, history_of(params, prompt, output)).tolist() == pytest.approx(expected, abs=1e-12)


def test_bias_comes_after_penalties_and_masks_after_bias() -> None:
    params = LogitParams(repetition_penalty=2.0, logit_bias={0: 10.0, 1: 100.0, 2: 100.0})
    history = history_of(params, [0], [])
    mask = np.array([True, True, False, True])
    logits = processed(row_of([4, 0, 0, 1]), params, history, banned=[1], mask=mask)
    assert logits.tolist() == [12.0, -math.inf, -math.inf, 1.0]


def test_the_row_is_not_modified() -> None:
    row = random_row(1)
    before = row.copy()
    params = LogitParams(
        repetition_penalty=1.5,
        presence_penalty=1,
        frequency_penalty=1,
        logit_bias={3: 5.0},
        top_k=9,
        top_p=0.9,
        min_p=0.1,
    )
    choose_token(row, params, history_of(params, [1, 2], [3]), [4], Noise(1, 0, 0), np.arange(row.size) % 2 == 0)
    assert np.array_equal(row, before)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=200), st.lists(st.integers(0, 40), max_size=40))
def test_history_is_a_stack_of_counts(operations: list[tuple[bool, int]], prompt: list[int]) -> None:
    params = LogitParams(repetition_penalty=1.1)
    history = TokenHistory(params, prompt)
    stack: list[int] = []
    for is_push, token in operations:
        if is_push:
            history.push(token)
            stack.append(token)
        elif stack:
            history.pop()
            stack.pop()
    counts = dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True))
    assert counts == {token: stack.count(token) for token in {*prompt, *stack}}


def test_history_costs_nothing_without_penalties() -> None:
    history = history_of(LogitParams(), [1, 2, 3], [4, 5])
    history.pop()
    assert history.ids.size == 0


def slow_choice(row: Row, params: LogitParams, noise: Noise) -> int:
    """All tokens get noise; nothing is pruned."""
    with np.errstate(over="ignore"):
        scores = scores_of(row, params.temperature)
    noisy = scores + to_gumbel(noise.row_words(row.size))
    return max(slow_kept(scores.tolist(), params), key=lambda i: (noisy[i], -i))


def coarse_blocks(seed: int, choice: int, position: int, blocks: Words) -> Words:
    """Noise of eight values only, so that sums of score and noise are often equal."""
    return philox_blocks(seed, choice, position, blocks) | np.uint32(0x1FFFFFFF)


def extreme_blocks(seed: int, choice: int, position: int, blocks: Words) -> Words:
    """The smallest noise for all tokens but about one in a thousand, which get the largest."""
    words = philox_blocks(seed, choice, position, blocks)
    return np.where(words % 1024 == 0, np.uint32(2**32 - 1), np.uint32(0))


blocks = st.sampled_from([choose_philox(), philox_blocks, coarse_blocks, extreme_blocks])
noises = st.builds(Noise, st.integers(-(2**63), 2**63 - 1), st.integers(0, 127), st.integers(0, 2**32 - 1), blocks)
wide_rows = st.builds(
    random_row, st.integers(0, 10**6), st.sampled_from([300, 2000, 9000]), st.sampled_from([0.0, 0.1, 3.0, 12.0])
)


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(rows, wide_rows),
    st.sampled_from([5e-324, 1e-3, 0.3, 1.0, 1.7, 1e300]),
    st.sampled_from([0, 20, 1500]),
    st.sampled_from([1.0, 0.8, 1e-9]),
    st.sampled_from([0.0, 0.1]),
    noises,
)
def test_pruning_never_changes_the_token(
    row: Row, temperature: float, top_k: int, top_p: float, min_p: float, noise: Noise
) -> None:
    params = LogitParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert choose_token(row, params, NONE, None, noise) == slow_choice(row, params, noise)


@settings(max_examples=50, deadline=None)
@given(wide_rows, st.sampled_from([0.01, 0.5, 0.999]), st.sampled_from([0, 20]), st.sampled_from([1.0, 0.8]), noises)
def test_impossible_tokens_are_never_chosen(
    row: Row, banned_share: float, top_k: int, top_p: float, noise: Noise
) -> None:
    """-infinity in the row, by mask and by ban: all the same."""
    params = LogitParams(top_k=top_k, top_p=top_p)
    mask = np.random.default_rng(abs(noise.seed)).random(row.size) >= banned_share
    mask[0] = True
    masked = np.where(mask, row, np.float32(-np.inf))
    expected = slow_choice(masked, params, noise)
    assert mask[expected]
    assert choose_token(masked, params, NONE, None, noise) == expected
    assert choose_token(row, params, NONE, None, noise, mask) == expected
    assert choose_token(row, params, NONE, np.flatnonzero(~mask).tolist(), noise) == expected


@pytest.mark.parametrize("philox", [choose_philox(), philox_blocks], ids=["quickest", "numpy"])
@pytest.mark.parametrize("spread", [0.1, 3.0, 12.0])
def test_a_whole_vocabulary_is_pruned_and_still_right(philox: PhiloxBlocks, spread: float) -> None:
    row = np.random.default_rng(5).normal(0, spread, 49_152).astype(np.float32)
    params = LogitParams(temperature=1.3)
    scores = scores_of(row, 1.3)
    for position in range(100):
        noise = Noise(9, 0, position, philox)
        assert choose_token(row, params, NONE, None, noise) == (scores + to_gumbel(noise.row_words(row.size))).argmax()


def chi_square(choose: Callable[[int], int], probs: Sequence[float], num_draws: int) -> float:
    counts = Counter(choose(i) for i in range(num_draws))
    assert all(probs[token] > 0 for token in counts)
    return sum((counts[i] - p * num_draws) ** 2 / (p * num_draws) for i, p in enumerate(probs) if p > 0)


def test_tokens_follow_the_distribution_over_positions_and_over_seeds() -> None:
    """14.86 is the 99.5 % point of chi-square with 4 degrees of freedom; seeds are fixed."""
    probs = [0.5, 0.2, 0.2, 0.09, 0.01]
    row = row_of(np.log(probs).tolist())
    params = LogitParams()
    assert chi_square(lambda i: choose_token(row, params, NONE, None, Noise(3, 0, i)), probs, 5000) < 14.86
    assert chi_square(lambda i: choose_token(row, params, NONE, None, Noise(i, 0, 0)), probs, 5000) < 14.86
    assert chi_square(lambda i: choose_token(row, params, NONE, None, Noise(3, i, 0)), probs, 5000) < 14.86


def test_filtered_tokens_follow_the_renormalised_distribution() -> None:
    row = row_of(np.log([0.5, 0.2, 0.2, 0.09, 0.01]).tolist())
    params = LogitParams(top_k=4, top_p=0.8, temperature=1.0)
    probs = [5 / 9, 2 / 9, 2 / 9, 0.0, 0.0]
    assert chi_square(lambda i: choose_token(row, params, NONE, None, Noise(11, 0, i)), probs, 5000) < 14.86


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 5e-324])
def test_no_and_tiny_temperatures_take_the_lowest_of_the_best(temperature: float) -> None:
    params = LogitParams(temperature=temperature, top_k=1, top_p=0.1, min_p=1.0)
    assert choose_token(row_of([1, 3, 3, 2]), params, NONE, None, Noise(1, 0, 0)) == 1


def test_extreme_penalties_stay_numbers() -> None:
    params = LogitParams(temperature=0.0, repetition_penalty=1e-308)
    assert choose_token(row_of([9.0, 1.0, 3.0]), params, history_of(params, [1, 2], []), None, Noise(1, 0, 0)) == 1
    params = LogitParams(temperature=1.0, repetition_penalty=1e308)
    history = history_of(params, [0, 1, 2], [])
    assert choose_token(row_of([-9.0, -1.0, -3.0]), params, history, None, Noise(1, 0, 0)) in {0, 1, 2}


def test_everything_masked_is_an_error() -> None:
    row = row_of([1, 2, 3])
    with pytest.raises(AllTokensMasked, match="masked"):
        choose_token(row, LogitParams(), NONE, [0, 1, 2], Noise(1, 0, 0))
    with pytest.raises(AllTokensMasked):
        choose_token(row, LogitParams(temperature=0), NONE, [1], Noise(1, 0, 0), np.array([False, True, False]))


@pytest.mark.parametrize("bad", [[1, math.nan, 3], [1, math.inf, 3], [-math.inf] * 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_rows_are_an_error(bad: list[float], temperature: float) -> None:
    with pytest.raises(BadLogits):
        choose_token(row_of(bad), LogitParams(temperature=temperature), NONE, None, Noise(1, 0, 0))
    with pytest.raises(BadLogits):
        row_logprobs(row_of(bad), 0, 1)


def test_a_batch_is_greedy_at_once_and_shows_bad_rows() -> None:
    logits = np.array([[1, 5, 5], [7, 2, 1], [math.nan, 1, 2], [math.inf, 1, 2], [-math.inf, 1, 2]], np.float32)
    assert argmax_rows(logits)[[0, 1, 4]].tolist() == [1, 0, 2]
    assert bad_rows(logits, argmax_rows(logits)).tolist() == [False, False, True, True, False]


def test_plain_greedy_is_said_only_where_the_argmax_is_the_law() -> None:
    assert LogitParams(temperature=0, top_k=5, top_p=0.5, min_p=0.5).plain_greedy
    assert not LogitParams().plain_greedy
    assert not LogitParams(temperature=0, logit_bias={1: 1.0}).plain_greedy
    assert not LogitParams(temperature=0, frequency_penalty=0.1).plain_greedy
    assert not LogitParams(temperature=0, repetition_penalty=0.9).plain_greedy


@settings(deadline=None)
@given(rows, st.integers(0, 20), st.integers(0, 10**6))
def test_logprobs_are_the_log_softmax(row: Row, top: int, chosen: int) -> None:
    chosen %= row.size
    total = math.log(math.fsum(math.exp(x) for x in row.tolist()))
    logprob, pairs = row_logprobs(row, chosen, top)
    assert logprob == pytest.approx(float(row[chosen]) - total, abs=1e-9)
    assert [token for token, _ in pairs] == sorted(range(row.size), key=lambda i: (-row[i], i))[:top]
    assert [value for _, value in pairs] == pytest.approx([float(row[token]) - total for token, _ in pairs], abs=1e-9)


def test_logprobs_have_a_floor_and_never_exceed_zero() -> None:
    assert row_logprobs(row_of([0, -math.inf]), 1, 2) == (-9999.0, [(0, 0.0), (1, -9999.0)])
    assert row_logprobs(row_of([30_000, 0]), 1, 0) == (-9999.0, [])


@given(st.integers(0, 10**6))
def test_what_leads_is_mostly_what_is_chosen(seed: int) -> None:
    """Of few tokens always: all of them are looked at."""
    rng = np.random.default_rng(seed)
    row = rng.normal(scale=3.0, size=60).astype(np.float32)
    params = LogitParams(
        temperature=float(rng.choice([0.0, 0.7, 1.0])), top_k=int(rng.choice([0, 5])), frequency_penalty=0.5
    )
    history = TokenHistory(params)
    history.push(int(row.argmax()))
    noise, mask = Noise(seed, 0, 3), rng.random(60) < 0.8
    mask[:2] = True
    tokens, shares = leading_tokens(row, params, history, [0], noise, mask, 4)
    assert tokens[0] == choose_token(row, params, history, [0], noise, mask)
    assert len(set(tokens.tolist())) == len(tokens) == 4
    assert mask[tokens].all()
    assert shares.sum() <= 1 + 1e-9
    assert (np.diff(shares) <= 0).all()


def test_what_leads_of_few_tokens_is_what_leads_of_all() -> None:
    rng = np.random.default_rng(0)
    row, names = rng.normal(scale=3.0, size=40).astype(np.float32), np.sort(rng.permutation(1000)[:40])
    full = np.full(1000, -np.inf, np.float32)
    full[names] = row
    for params in (LogitParams(temperature=0.8, top_p=0.9), LogitParams(temperature=0.0), LogitParams(top_k=3)):
        given = (params, TokenHistory(params), None, Noise(7, 1, 2), None, 3)
        few, all_of_them = leading_tokens(row, *given, names), leading_tokens(full, *given)
        assert few[0].tolist() == all_of_them[0].tolist()
        assert few[1] == pytest.approx(all_of_them[1])


def odd_row(rng: np.random.Generator, size: int) -> Row:
    """Flat, peaked, with ties and impossible tokens."""
    row = (rng.standard_normal(size) * rng.choice([0.0, 0.1, 3.0, 100.0])).astype(np.float32)
    if rng.random() < 0.3:
        row = row.round()
    row[rng.random(size) < rng.choice([0.0, 0.5])] = rng.choice([-np.inf, 2.0])
    row[rng.integers(size)] = rng.choice([0.0, 15.0, 1e30])
    return row


def odd_params(rng: np.random.Generator) -> LogitParams:
    """Any temperature; each of the others about every second time."""
    share = 10.0 ** -rng.integers(1, 17)
    return LogitParams(
        temperature=float(rng.choice([1e-300, 1e-4, 0.3, 1.0, 1.7, 1e4])),
        top_k=int(rng.choice([0, 0, 0, 1, 2, 20, 1000])),
        top_p=float(rng.choice([1.0, 1.0, 0.95, 0.5, share, 1.0 - share])),
        min_p=float(rng.choice([0.0, 0.0, 0.05, 1e-9, 1.0])),
        repetition_penalty=float(rng.choice([1.0, 1.0, 1.3, 1e-308])),
        frequency_penalty=float(rng.choice([0.0, 0.0, 0.3])),
        logit_bias={0: float(rng.choice([-100.0, 3.0]))} if rng.random() < 0.2 else {},
    )


def test_the_quick_way_finds_the_token_of_the_plain_one(native: NativeOps) -> None:
    """Rows of odd lengths, and whatever shapes them."""
    rng, num_quick = np.random.default_rng(5), 0
    for i in range(1500):
        size = int(rng.choice([1, 2, 7, 15, 16, 17, 95, 96, 97, 200, 3000]))
        row, params = odd_row(rng, size), odd_params(rng)
        history = history_of(params, rng.integers(0, size, 5).tolist(), rng.integers(0, size, 9).tolist())
        mask = rng.random(size) < 0.8 if rng.random() < 0.2 else None
        banned = [int(row.argmax())] if rng.random() < 0.2 else None
        seed, choice, position = int(rng.integers(-(2**63), 2**63)), i % 3, int(rng.integers(2**32))
        asked: list[object] = []

        def contenders(*about: Any, asked: list[object] = asked) -> Any:
            asked.append(native.contenders(*about))
            return asked[-1]

        plain, quick = Noise(seed, choice, position), Noise(seed, choice, position, contenders=contenders)
        expected, found = (outcome(row, params, history, banned, noise, mask) for noise in (plain, quick))
        assert found == expected, (size, params)
        num_quick += bool(asked) and asked[0] is not None
    assert num_quick > 500


def outcome(row: Row, *given: Any) -> int | str:
    """The token, or which error it is."""
    try:
        return choose_token(row, *given)
    except (AllTokensMasked, BadLogits) as error:
        return type(error).__name__


@pytest.mark.parametrize(
    "fields",
    [{}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 50, "top_p": 0.8}, {"min_p": 0.02}, {"frequency_penalty": 0.3}],
)
def test_the_quick_way_over_whole_vocabularies(native: NativeOps, fields: dict[str, Any]) -> None:
    contenders, rng, params = native.contenders, np.random.default_rng(6), LogitParams(temperature=0.8, **fields)
    for position in range(60):
        row = (rng.standard_normal(49152) * rng.choice([0.0, 1.0, 3.0])).astype(np.float32)
        history = history_of(params, [], rng.integers(0, 49152, 100).tolist())
        noises = Noise(9, 0, position), Noise(9, 0, position, contenders=contenders)
        plain, quick = (choose_token(row, params, history, None, noise) for noise in noises)
        assert plain == quick


@pytest.mark.parametrize("kind", ["halves", "equal"])
def test_the_quick_way_where_the_mass_just_reaches_the_nucleus(native: NativeOps, kind: str) -> None:
    """Shares that are the masses themselves, and one rounding beside them: the definition's own sums decide."""
    rng = np.random.default_rng(7)
    for position in range(200):
        row = np.log(np.exp2(rng.integers(0, 4 if kind == "halves" else 1, 300))).astype(np.float32)
        weights = np.sort(np.exp(scores_of(row)))[::-1]
        share = float(np.cumsum(weights)[rng.integers(300)] / weights.sum())
        for top_p in (np.nextafter(share, 0), share, np.nextafter(share, 1)):
            noises = Noise(position, 0, 0), Noise(position, 0, 0, contenders=native.contenders)
            plain, quick = (choose_token(row, LogitParams(top_p=float(top_p)), NONE, None, noise) for noise in noises)
            assert plain == quick


def test_the_quick_way_is_for_temperatures_alone() -> None:
    asked = []

    def quick(*words: object) -> Any:
        asked.append(words)

    noise = Noise(1, 0, 0, contenders=quick)
    choose_token(row_of([1, 2, 3, 2]), LogitParams(temperature=0.0, logit_bias={1: 9.0}), NONE, None, noise)
    assert not asked


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_quick_way_refuses_bad_logits(native: NativeOps, bad: float) -> None:
    noise = Noise(1, 0, 0, contenders=native.contenders)
    for row in (row_of([1.0, bad, 2.0]), row_of([-float("inf")] * 3)):
        with pytest.raises(BadLogits):
            choose_token(row, LogitParams(), NONE, None, noise)

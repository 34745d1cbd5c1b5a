"""The engine over the hash model: the law, ends inside accepted blocks, preemption, faults, bounds."""

import random
import time
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import HealthCheck

from verdraft.scheduler.errors import ContextTooLong
from verdraft.scheduler.request import Fault
from verdraft.spec.draft import ASK, EMPTY, Draft, NoDrafter
from verdraft.spec.spending import CostTable

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def plain(make_engine, drain, make_request, prompt, **fields):
    """The output alone, without speculation, in a large pool: what the law asks for."""
    request = make_request("ref", prompt, speculation="off", **fields)
    engine = make_engine(num_blocks=256)
    engine.add(request)
    return drain(engine)["ref"].tokens


def test_one_request_ends_at_max_tokens(make_engine, drain, make_request):
    engine = make_engine()
    engine.add(make_request("a", PROMPT, max_tokens=5, ignore_eos=True))
    found = drain(engine)["a"]
    assert len(found.tokens) == 5
    assert found.finish == "length"
    summary = found.slices[-1].summary
    assert summary.num_output_tokens == 5
    assert summary.timing.first_token <= summary.timing.finished


def test_a_right_prediction_is_taken_for_the_most_part_whatever_rows_cost(make_engine, drain, make_request):
    """Three choices on a machine where a further row costs as much as a pass: cost alone would forbid every draft."""
    fields = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.0}
    right = plain(make_engine, drain, make_request, PROMPT, **fields)
    engine = make_engine(num_blocks=256)
    engine.drafting.costs = CostTable((1, 2), (1.0, 2.0))
    requests = [make_request(f"r{i}", PROMPT, prediction=tuple(right), **fields) for i in range(3)]
    for request in requests:
        engine.add(request)
    found = drain(engine)
    assert all(found[request.id].tokens == right for request in requests)
    accepted = [request.stats.sources["prediction"].num_accepted_tokens for request in requests]
    assert min(accepted) > 0.7 * 40


def test_drafts_that_their_rows_forbid_pay_where_every_step_takes_long(
    make_engine, drain, make_request, scripted, monkeypatch
):
    fields = {"max_tokens": 120, "ignore_eos": True}
    answer = plain(make_engine, drain, make_request, PROMPT, **fields)
    accepted, clock = [], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def pass_time(seconds):
        clock[0] += seconds

    for model_takes in (0.0, 0.01):
        engine = make_engine(drafter_factory=lambda request: scripted(answer, wrong=0.0, seed=0))
        engine.drafting.costs = CostTable((1, 32), (0.001, 0.048))  # a further row takes longer than a pass
        engine._runner.model.before_forward = partial(pass_time, model_takes)
        request = make_request("a", PROMPT, **fields)
        engine.add(request)
        assert drain(engine)["a"].tokens == answer
        accepted.append(sum(stats.num_accepted_tokens for stats in request.stats.sources.values()))
    assert accepted[1] > accepted[0] + 20


def test_zero_tokens_computes_the_prompt_alone(make_engine, drain, make_request):
    engine = make_engine()
    engine.add(make_request("a", PROMPT, max_tokens=0, prompt_logprobs=2))
    found = drain(engine)["a"]
    assert (found.tokens, found.finish) == ([], "length")
    assert len(found.slices[0].prompt_logprobs) == len(PROMPT) - 1


def test_a_prompt_that_cannot_be_scored_fails_alone(make_engine, drain, make_request):
    engine = make_engine()
    for name, fault in (("bad", Fault("nan")), ("good", None)):
        engine.add(make_request(name, PROMPT, max_tokens=0, prompt_logprobs=2, fault=fault))
    found = drain(engine)
    assert (found["bad"].finish, found["good"].finish) == ("error", "length")
    assert len(found["good"].slices[0].prompt_logprobs) == len(PROMPT) - 1
    assert engine.counters().corrupted == 1


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6))
def test_any_mix_of_drafts_pool_sizes_and_arrivals_keeps_the_law(make_engine, drain, make_request, scripted, seed):
    rnd = random.Random(seed)
    shared = [rnd.randrange(1, 40) for _ in range(12)]
    jobs, answers = {}, {}
    for i in range(7):
        prompt = shared[: rnd.randint(1, 12)] + [rnd.randrange(1, 40) for _ in range(rnd.randint(0, 20))]
        params = {"max_tokens": rnd.randint(1, 40), "temperature": rnd.choice([0.0, 1.0]), "seed": i}
        params |= {"choice": rnd.randint(0, 2), "repetition_penalty": rnd.choice([1.0, 1.3]), "min_tokens": 1}
        jobs[f"r{i}"] = (prompt, params)
        answers[f"r{i}"] = plain(make_engine, drain, make_request, prompt, **params)

    def drafter(request):
        return scripted(answers[request.id], wrong=rnd.random() * 0.5, seed=seed)

    engine = make_engine(
        num_blocks=rnd.choice([19, 24, 64]), max_batch_tokens=rnd.choice([8, 9, 32]), drafter_factory=drafter
    )
    found = {}
    for name, (prompt, params) in jobs.items():
        engine.add(make_request(name, prompt, arrived=rnd.random(), priority=rnd.randint(-1, 1), **params))
        for _ in range(rnd.randint(0, 6)):
            for request, piece in engine.step():
                found.setdefault(request.id, []).extend(piece.tokens)
            engine.check_integrity()
    for name, rest in drain(engine).items():
        found.setdefault(name, []).extend(rest.tokens)
    assert found == answers


def test_the_suffix_source_is_exact_and_saves_passes(make_engine, drain, make_request):
    prompt = PROMPT * 3
    answer = plain(make_engine, drain, make_request, prompt, max_tokens=60, ignore_eos=True)
    engine = make_engine()
    passes = []
    for name in ("first", "second"):
        before = engine.counters().target_passes
        engine.add(make_request(name, prompt, max_tokens=60, ignore_eos=True))
        assert drain(engine)[name].tokens == answer
        passes.append(engine.counters().target_passes - before)
    assert passes[1] < passes[0] / 2


def test_prediction_drafts_the_answer(make_engine, drain, make_request):
    answer = plain(make_engine, drain, make_request, PROMPT, max_tokens=40, ignore_eos=True)
    engine = make_engine()
    request = make_request("a", PROMPT, max_tokens=40, ignore_eos=True, prediction=answer)
    engine.add(request)
    assert drain(engine)["a"].tokens == answer
    assert request.stats.sources["prediction"].num_accepted_tokens > 28


@pytest.mark.parametrize(("speculation", "drafts"), [("auto", True), ("off", False)])
def test_a_server_that_drafts_nothing_still_tries_what_a_request_predicts(
    make_engine, drain, make_request, speculation, drafts
):
    fields = {"max_tokens": 40, "ignore_eos": True}
    answer = plain(make_engine, drain, make_request, PROMPT, **fields)
    engine = make_engine(speculation="off")
    request = make_request("a", PROMPT, prediction=answer, speculation=speculation, **fields)
    engine.add(request)
    assert drain(engine)["a"].tokens == answer
    assert list(request.stats.sources) == ["prediction"] * drafts


@pytest.mark.parametrize("where", range(1, 9))
def test_an_end_inside_an_accepted_block_leaves_no_trace_behind_it(make_engine, drain, make_request, scripted, where):
    answer = plain(make_engine, drain, make_request, PROMPT, max_tokens=20, ignore_eos=True)
    stop = answer[where]
    first = answer.index(stop)
    engine = make_engine(drafter_factory=lambda request: scripted(answer, wrong=0.0, seed=where))
    engine.add(make_request("a", PROMPT, max_tokens=20, ignore_eos=True, stop_token_ids=frozenset({stop}), logprobs=1))
    found = drain(engine)["a"]
    assert found.tokens == answer[: first + 1]
    assert found.finish == "stop"
    assert sum(len(piece.logprobs) for piece in found.slices) == first + 1
    assert engine.counters().generation_tokens == first + 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_behind_a_wrong_token_harms_nobody(make_engine, drain, make_request, hash_model, temperature):
    """A prediction that led the model to NaN once ended the request with an error; plain decoding never comes there."""
    fields = {"max_tokens": 20, "ignore_eos": True, "temperature": temperature, "seed": 1}
    answer = plain(make_engine, drain, make_request, PROMPT, **fields)
    model, poison = hash_model(), next(token for token in range(48) if token not in answer)
    logits = model.logits

    def poisoned(hidden):
        rows = logits(hidden)
        rows[[model.prefixes[value][-1] == poison for value in hidden[:, 0].tolist()]] = float("nan")
        return rows

    model.logits = poisoned
    engine = make_engine(model=model)
    request = make_request("a", PROMPT, prediction=[*answer[:5], poison, *answer[6:]], **fields)
    engine.add(request)
    found = drain(engine)["a"]
    assert (found.tokens, found.finish) == (answer, "length")
    assert request.stats.sources["prediction"].num_draft_tokens > 5


def test_a_second_prompt_reuses_whole_blocks_but_not_across_salts(make_engine, drain, make_request):
    engine = make_engine()
    cached = []
    for name, salt in (("a", ""), ("b", ""), ("c", "x"), ("d", "x")):
        engine.add(make_request(name, PROMPT, max_tokens=3, ignore_eos=True, cache_salt=salt))
        cached.append(drain(engine)[name].slices[-1].summary.cached_tokens)
    assert cached == [0, 8, 0, 8]


def test_choices_share_the_first_ones_prefix(make_engine, drain, make_request):
    engine = make_engine()
    first = make_request("0", PROMPT * 4, max_tokens=3, ignore_eos=True)
    engine.add(first)
    engine.add(make_request("1", PROMPT * 4, max_tokens=3, ignore_eos=True, choice=1), leader=first)
    before = engine.counters().iteration_tokens
    drain(engine)
    assert engine.counters().iteration_tokens - before < 2 * len(PROMPT * 4)
    assert engine.counters().prefix_cache_hits == 8


def test_a_sequence_that_outgrows_the_pool_ends_with_length(make_engine, drain, make_request):
    engine = make_engine(num_blocks=4)
    engine.add(make_request("a", PROMPT, max_tokens=200, ignore_eos=True))
    found = drain(engine)["a"]
    assert found.finish == "length"
    assert len(found.tokens) == 4 * 4 + 1 - len(PROMPT)


def test_a_prompt_that_can_never_fit_is_refused(make_engine, make_request):
    engine = make_engine(num_blocks=4)
    with pytest.raises(ContextTooLong, match="16 tokens") as caught:
        engine.add(make_request("a", [1] * 16, max_tokens=1))
    assert (caught.value.prompt_len, caught.value.limit) == (16, 15)
    assert not engine.has_work


def test_a_short_prompt_overtakes_a_long_one(make_engine, drain, make_request):
    engine = make_engine(num_blocks=128, max_batch_tokens=16)
    engine.add(make_request("long", [1] * 200, max_tokens=1, ignore_eos=True))
    engine.add(make_request("short", [2] * 8, max_tokens=1, ignore_eos=True))
    order = list(drain(engine))
    assert order == ["short", "long"]


def test_priority_goes_first_but_waiting_makes_up_for_it(make_engine, drain, make_request):
    engine = make_engine(max_num_seqs=1)
    engine.add(make_request("late", [1] * 4, max_tokens=1, priority=0, arrived=100.0))
    engine.add(make_request("urgent", [2] * 4, max_tokens=1, priority=-1, arrived=101.0))
    engine.add(make_request("patient", [3] * 4, max_tokens=1, priority=5, arrived=-100.0))
    assert list(drain(engine)) == ["patient", "urgent", "late"]


def test_abort_frees_everything_wherever_the_request_is(make_engine, drain, make_request):
    engine = make_engine(max_num_seqs=1, max_batch_tokens=8)
    requests = [make_request(name, PROMPT * 2, max_tokens=50, ignore_eos=True) for name in "abc"]
    for request in requests:
        engine.add(request)
    engine.step()  # "a" is in the middle of its prompt, the others wait
    for request in requests[:2]:
        ((_, piece),) = engine.abort(request)
        assert piece.finish == "abort"
    assert engine.abort(requests[0]) == []
    assert drain(engine)["c"].finish == "length"
    assert engine.counters().aborted == 2


@pytest.mark.parametrize("kind", ["raise", "nan"])
def test_a_failing_request_fails_alone(make_engine, drain, make_request, kind):
    answer = plain(make_engine, drain, make_request, PROMPT, max_tokens=12, ignore_eos=True)
    engine = make_engine()
    fault = Fault(kind, after_tokens=4)
    engine.add(make_request("bad", [*PROMPT, 3], max_tokens=12, ignore_eos=True, fault=fault))
    engine.add(make_request("good", PROMPT, max_tokens=12, ignore_eos=True))
    found = drain(engine)
    assert found["good"].tokens == answer
    assert (found["bad"].finish, found["bad"].slices[-1].error_code) == ("error", "internal_error")
    assert len(found["bad"].tokens) >= 4
    assert engine.counters().corrupted == (kind == "nan")


class Breaks:
    """A stop check and a draft source that fails in one of its methods at the third token, in start() at once."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.count = 0

    def _did(self, method: str, num_tokens: int) -> None:
        self.count += num_tokens
        if method == self.method and self.count >= 3:
            raise RuntimeError(method)

    def push(self, token: int) -> bool:
        self._did("push", self.method == "push")
        return False

    def start(self, prompt: Sequence[int]) -> None:
        self._did("start", 3 * (self.method == "start"))

    def extend(self, tokens: Sequence[int]) -> None:
        self._did("extend", 0 if self.method == "push" else len(tokens))

    def clue(self) -> int:
        self._did("clue", 0)
        return ASK

    def propose(self, limit: int) -> Draft:
        self._did("propose", 0)
        return EMPTY

    def stop(self) -> None:
        self._did("stop", 0)


@pytest.mark.parametrize("method", ["push", "start", "extend", "clue", "propose", "stop"])
def test_a_request_whose_helpers_fail_harms_no_other(make_engine, drain, make_request, method):
    """Such an error once ended every running request, and lost tokens that were committed in the same step."""
    answer = plain(make_engine, drain, make_request, PROMPT, max_tokens=12, ignore_eos=True)
    broken = Breaks(method)
    engine = make_engine(drafter_factory=lambda request: broken if request.id == "bad" else NoDrafter())
    engine.add(make_request("good", PROMPT, max_tokens=12, ignore_eos=True))
    engine.add(make_request("bad", PROMPT, max_tokens=12, ignore_eos=True, stop=broken))
    engine.add(make_request("other", PROMPT, max_tokens=12, ignore_eos=True))
    found = drain(engine)
    assert found["good"].tokens == found["other"].tokens == answer
    lost = method == "push"  # the other methods only draft
    assert found["bad"].finish == ("error" if lost else "length")
    assert found["bad"].tokens == answer[: 2 if lost else 12]


def test_an_abort_comes_through_whatever_the_draft_source_does(make_engine, drain, make_request):
    """An error in stop() once left the aborted request among those that run, and its client without an end."""
    engine = make_engine(drafter_factory=lambda request: Breaks("stop"))
    request = make_request("bad", PROMPT, max_tokens=12, ignore_eos=True)
    engine.add(request)
    while engine.counters().generation_tokens < 4:
        engine.step()
    [(ended, piece)] = engine.abort(request)
    assert (ended, piece.finish) == (request, "abort")
    assert not engine.has_work
    assert engine.abort(request) == []


def test_forced_preemption_changes_nothing(make_engine, drain, make_request):
    answer = plain(make_engine, drain, make_request, PROMPT, max_tokens=12, ignore_eos=True)
    engine = make_engine()
    engine.add(make_request("a", PROMPT, max_tokens=12, ignore_eos=True, fault=Fault("preempt", after_tokens=5)))
    assert drain(engine)["a"].tokens == answer
    assert engine.counters().num_preemptions == 1


@pytest.mark.parametrize("make_engine", ["host"], indirect=True)  # preempts between two parts of a step
def test_a_preempted_prompt_is_scored_once(make_engine, drain, make_request):
    """What had been scored before a preemption in the middle of a prompt once came twice."""
    found = []
    for preempts in (False, True):
        engine = make_engine(max_batch_tokens=4)
        engine.add(make_request("a", PROMPT, max_tokens=3, ignore_eos=True, prompt_logprobs=1))
        engine.step()
        if preempts:
            engine.scheduler.preempt(engine.scheduler.running[0])
        found.append([entry for piece in drain(engine)["a"].slices for entry in piece.prompt_logprobs])
    assert len(found[0]) == len(PROMPT) - 1
    assert found[1] == found[0]


def test_reset_forgets_prefixes_and_suffixes(make_engine, drain, make_request):
    engine = make_engine()
    for _ in range(2):
        engine.add(make_request("a", PROMPT, max_tokens=9, ignore_eos=True))
        found = drain(engine)["a"]
        assert found.slices[-1].summary.cached_tokens == 0
        assert engine.counters().suffix_store_tokens > 0
        engine.reset_caches()
        assert engine.counters().suffix_store_tokens == 0


def test_unseeded_choices_differ_and_seeded_ones_repeat(make_engine, drain, make_request):
    engine = make_engine()
    outputs = {}
    for name, fields in {
        "fresh1": {},
        "fresh2": {},
        "seeded1": {"seed": 7},
        "seeded2": {"seed": 7},
        "choice": {"seed": 7, "choice": 1},
    }.items():
        engine.add(make_request(name, PROMPT, max_tokens=20, temperature=1.5, ignore_eos=True, **fields))
        outputs[name] = drain(engine)[name].tokens
    assert outputs["fresh1"] != outputs["fresh2"]
    assert outputs["seeded1"] == outputs["seeded2"]
    assert outputs["choice"] != outputs["seeded1"]


@pytest.mark.parametrize(("count", "ending"), [(48, ("error", "invalid_value")), (47, ("stop", None))])
def test_a_request_that_forbids_every_token_is_at_fault_itself(make_engine, drain, make_request, count, ending):
    engine = make_engine()
    engine.add(make_request("a", [5, 6], min_tokens=2, max_tokens=9, stop_token_ids=frozenset(range(count))))
    last = drain(engine)["a"].slices[-1]
    assert (last.finish, last.error_code) == ending
    assert engine.counters().corrupted == 0

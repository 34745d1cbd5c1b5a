"""Draft trees: the law, what a pool holds after an accepted path, and segments, whatever shape the trees have."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import HealthCheck

from verdraft.scheduler.request import Fault
from verdraft.spec.draft import NoDrafter

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def answer_of(make_engine, drain, make_request, prompt, **fields):
    """Ids and logprobs alone, without speculation."""
    engine = make_engine(num_blocks=256, **fields.pop("model", {}))
    engine.add(make_request("ref", prompt, speculation="off", **fields))
    found = drain(engine)["ref"]
    return found.tokens, [entry for piece in found.slices for entry in piece.logprobs]


def drafter_for(rnd, kinds, answer):
    kind = rnd.choice(kinds)
    return kind(answer, wrong=rnd.choice([0.0, 0.3, 0.7]), seed=rnd.random()) if kind else NoDrafter()


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6))
def test_any_trees_keep_the_law(
    make_engine, drain, make_request, exiting, watch, scripted, scripted_trees, caplog, seed
):
    """Beside chains, windows of exits and plain decoding, in one segment and in three, with little memory."""
    rnd = random.Random(seed)
    segments = exiting(0.8, 0.8)
    model = segments if rnd.random() < 0.5 else {"model": segments["model"]}
    shared = [rnd.randrange(1, 40) for _ in range(8)]
    jobs, answers = {}, {}
    for i in range(5):
        prompt = shared[: rnd.randint(1, 8)] + [rnd.randrange(1, 40) for _ in range(rnd.randint(0, 12))]
        params = {"max_tokens": rnd.randint(1, 16), "temperature": rnd.choice([0.0, 1.0]), "seed": i, "logprobs": 2}
        params |= {"repetition_penalty": rnd.choice([1.0, 1.3]), "min_tokens": rnd.choice([0, 5])}
        params |= {"choice": rnd.randint(0, 2), "frequency_penalty": rnd.choice([0.0, 1.5])}
        jobs[f"r{i}"] = (prompt, params)
        answers[f"r{i}"] = answer_of(make_engine, drain, make_request, prompt, model=model, **params)
    kinds = [scripted_trees, scripted_trees, scripted, None]
    engine = make_engine(
        num_blocks=rnd.choice([12, 16, 64]),
        max_batch_tokens=rnd.choice([8, 9, 32]),
        max_num_seqs=4,
        drafter_factory=lambda request: drafter_for(rnd, kinds, answers[request.id][0]),
        **model,
    )
    watch(engine, segments["model"])
    found = {}
    for name, (prompt, params) in jobs.items():
        fault = rnd.choice([None, Fault(kind="preempt", after_tokens=rnd.randint(0, 4))])
        engine.add(make_request(name, prompt, speculation=rnd.choice(["hispec", "off"]), fault=fault, **params))
        for _ in range(rnd.randint(0, 6)):
            for request, piece in engine.step():
                found.setdefault(request.id, []).append(piece)
    for name, rest in drain(engine).items():
        found.setdefault(name, []).extend(rest.slices)
    assert {name: [t for piece in pieces for t in piece.tokens] for name, pieces in found.items()} == {
        name: tokens for name, (tokens, _) in answers.items()
    }
    assert {name: [e for piece in pieces for e in piece.logprobs] for name, pieces in found.items()} == {
        name: scores for name, (_, scores) in answers.items()
    }
    assert not caplog.records


def test_trees_around_the_truth_are_accepted(make_engine, drain, make_request, scripted_trees):
    answer, _ = answer_of(make_engine, drain, make_request, PROMPT, max_tokens=60, ignore_eos=True)
    engine = make_engine(drafter_factory=lambda request: scripted_trees(answer, wrong=0.2, seed=1))
    request = make_request("a", PROMPT, max_tokens=60, ignore_eos=True)
    engine.add(request)
    assert drain(engine)["a"].tokens == answer
    stats = request.stats.sources["eagle"]
    assert request.stats.num_target_passes < 30
    assert stats.num_accepted_tokens + request.stats.num_target_passes == 59  # the prompt's pass gave the first token
    assert stats.num_draft_tokens > 2 * stats.num_accepted_tokens


def test_an_end_inside_an_accepted_path_ends_everything_there(make_engine, drain, make_request, scripted_trees):
    fields = {"max_tokens": 20, "ignore_eos": True, "logprobs": 1}
    answer, scores = answer_of(make_engine, drain, make_request, PROMPT, **fields)
    for where in range(1, 12):
        first = answer.index(answer[where])
        engine = make_engine(drafter_factory=lambda request, seed=where: scripted_trees(answer, wrong=0.1, seed=seed))
        engine.add(make_request("a", PROMPT, stop_token_ids=frozenset({answer[where]}), **fields))
        found = drain(engine)["a"]
        assert (found.tokens, found.finish) == (answer[: first + 1], "stop")
        assert [entry for piece in found.slices for entry in piece.logprobs] == scores[: first + 1]


def test_a_fault_beside_a_tree_stays_its_own(make_engine, drain, make_request, scripted_trees):
    answer, _ = answer_of(make_engine, drain, make_request, PROMPT, max_tokens=20, ignore_eos=True)
    for kind in ("raise", "nan"):
        engine = make_engine(drafter_factory=lambda request: scripted_trees(answer, wrong=0.2, seed=3))
        engine.add(make_request("bad", PROMPT, max_tokens=20, ignore_eos=True, fault=Fault(kind=kind, after_tokens=5)))
        engine.add(make_request("good", PROMPT, max_tokens=20, ignore_eos=True))
        found = drain(engine)
        assert found["good"].tokens == answer
        assert found["bad"].finish == "error"

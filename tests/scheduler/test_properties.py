"""What must hold for every request: equal ids under any drafts, tenants that cannot see each other, nothing left over.

`make properties` tries many times more.
"""

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import HealthCheck

from verdraft.scheduler.async_engine import AsyncEngine
from verdraft.scheduler.errors import QueueFull
from verdraft.scheduler.request import Fault

BLOCK = 4  # make_engine's
PATIENCE = 30  # seconds for what takes none

share = settings.default.max_examples
how = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
some = settings(how, max_examples=share // 10)  # on each of two devices
few = settings(how, max_examples=share // 20)

tokens = st.integers(0, 47)
prompts = st.lists(tokens, min_size=1, max_size=20)
sampling = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "seed": st.integers(-5, 5),
        "max_tokens": st.integers(1, 30),
    },
    optional={
        "top_k": st.sampled_from([1, 2, 5, 48, 1000, 2**63 - 1]),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 1.0),
        "repetition_penalty": st.floats(0.1, 3.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 5.0, 100.0]), max_size=3),
        "min_tokens": st.integers(0, 12),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.frozensets(tokens, max_size=3),
        "logprobs": st.integers(0, 3),
        "choice": st.integers(0, 3),
    },
)


def finished(drain, engine, request):
    """(ids, finish, logprobs) of one request, alone."""
    engine.add(request)
    found = drain(engine)[request.id]
    return found.tokens, found.finish, [entry for piece in found.slices for entry in piece.logprobs]


@some
@given(prompts, sampling, st.floats(0, 1), st.integers(0, 99))
def test_no_draft_changes_what_any_parameters_give(
    make_engine, drain, make_request, scripted, prompt, fields, wrong, seed
):
    plain = finished(drain, make_engine(), make_request("a", prompt, speculation="off", **fields))
    lied_to = make_engine(drafter_factory=lambda request: scripted(plain[0], wrong, seed))
    assert finished(drain, lied_to, make_request("a", prompt, **fields)) == plain
    guessing = make_engine()
    guess = [token if i % 7 else 3 for i, token in enumerate(plain[0])]
    for prediction in ((), tuple(plain[0]), tuple(guess)):
        assert finished(drain, guessing, make_request("a", prompt, prediction=prediction, **fields)) == plain


visits = st.lists(
    st.tuples(
        st.sampled_from(["", "x", "y"]), st.integers(0, 2), prompts, st.integers(1, 12), st.sampled_from([0.0, 1.0])
    ),
    min_size=2,
    max_size=8,
)


def visit(engine, drain, make_request, root, case):
    """What one client can see of its request: the ids, the cached tokens, the speculation."""
    salt, num_shared, rest, max_tokens, temperature = case
    prompt = [*root[: 6 * num_shared], *rest]
    fields = {"max_tokens": max_tokens, "temperature": temperature, "seed": 3, "cache_salt": salt}
    engine.add(make_request("a", prompt, **fields))
    found = drain(engine)["a"]
    summary = found.slices[-1].summary
    return prompt, tuple(found.tokens), summary.cached_tokens, summary.spec


@some
@given(st.lists(tokens, min_size=12, max_size=12), visits)
def test_a_tenant_cannot_tell_who_else_is_there(make_engine, drain, make_request, root, cases):
    engine = make_engine(num_blocks=256)
    seen = [(case[0], visit(engine, drain, make_request, root, case)) for case in cases]
    for salt in ("", "x", "y"):
        alone = make_engine(num_blocks=256)
        of_salt = [case for case in cases if case[0] == salt]
        assert [visit(alone, drain, make_request, root, case) for case in of_salt] == [v for s, v in seen if s == salt]


@some
@given(st.lists(tokens, min_size=12, max_size=12), visits)
def test_cached_tokens_are_whole_blocks_that_the_tenant_has_computed(make_engine, drain, make_request, root, cases):
    engine, known = make_engine(num_blocks=256), []
    for case in cases:
        prompt, output, cached, _ = visit(engine, drain, make_request, root, case)
        fresh = visit(make_engine(), drain, make_request, root, case)
        assert output == fresh[1]
        assert cached % BLOCK == 0
        assert cached < len(prompt)
        # The last token of an answer is never computed, so it is in no cached block.
        longest = max((common(prompt, other) for salt, other in known if salt == case[0]), default=0)
        assert cached == min(longest, len(prompt) - 1) // BLOCK * BLOCK
        known.append((case[0], [*prompt, *output[:-1]]))


def common(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Client:
    """Acts at random on an AsyncEngine; knows which of its sequences it has disturbed."""

    def __init__(self, bridge, make_request, rnd):
        self.bridge, self.make_request, self.rnd = bridge, make_request, rnd
        self.open, self.untouched, self.made = [], [], 0

    async def act(self):
        await self.rnd.choice([self.submit, self.submit, self.read, self.abort, self.leave, self.reset, self.pause])()

    async def submit(self):
        rnd = self.rnd
        self.made += 1
        prompt = [rnd.randrange(1, 40) for _ in range(rnd.randint(1, 20))]
        fault = rnd.choice([None, None, None, Fault("raise", 2), Fault("nan", 1), Fault("preempt", 1)])
        fields = {"max_tokens": rnd.randint(1, 30), "temperature": 1.0, "seed": self.made, "fault": fault}
        fields |= {"cache_salt": rnd.choice(["", "x"]), "priority": rnd.randint(-1, 1)}
        requests = [self.make_request("a", prompt, choice=i, **fields) for i in range(rnd.randint(1, 3))]
        try:
            streams = self.bridge.submit(requests)
        except QueueFull:
            return
        self.open += streams
        if fault is None or fault.kind == "preempt":
            self.untouched += streams

    async def read(self):
        for stream in self.open[:3]:
            if not stream._exhausted:
                async with asyncio.timeout(PATIENCE):
                    await anext(stream, None)
                self.untouched = [other for other in self.untouched if other is not stream]

    async def abort(self):
        if self.open:
            stream = self.rnd.choice(self.open)
            stream.abort()
            self.untouched = [other for other in self.untouched if other is not stream]

    async def leave(self):
        if self.open:
            stream = self.open.pop(self.rnd.randrange(len(self.open)))
            await stream.aclose()
            self.untouched = [other for other in self.untouched if other is not stream]

    async def reset(self):
        await self.bridge.reset_caches()

    async def pause(self):
        await asyncio.sleep(self.rnd.choice([0, 0.001]))


async def live(bridge, make_request, rnd):
    """A random life; (request, ids) of every sequence that nobody disturbed."""
    await bridge.start()
    client = Client(bridge, make_request, rnd)
    for _ in range(25):
        await client.act()
    async with asyncio.timeout(PATIENCE):
        found = {stream: [piece async for piece in stream] for stream in client.open}
        while bridge._streams:  # what was left alone ends by itself  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    for stream, pieces in found.items():
        assert stream._exhausted
        assert sum(piece.finish is not None for piece in pieces) <= 1
    await bridge.reset_caches()  # a turn of the thread: what it was doing is done
    assert not bridge._groups
    assert bridge.health() == "ok"
    counters = bridge.counters()
    assert (counters.num_running, counters.num_waiting, counters.kv_blocks_used) == (0, 0, 0)
    bridge.engine.check_integrity()
    assert not bridge.engine._sequences
    await bridge.close()
    return [(s.request, [t for piece in found[s] for t in piece.tokens]) for s in client.untouched]


@few
@given(st.integers(0, 10**6))
def test_any_life_leaves_nothing_behind_and_the_undisturbed_get_their_answer(make_engine, drain, make_request, seed):
    rnd = random.Random(seed)
    engine = make_engine(num_blocks=rnd.choice([16, 20, 64]), max_num_seqs=rnd.choice([2, 8]), max_queue=4)
    for request, ids in asyncio.run(live(AsyncEngine(engine), make_request, rnd)):
        fields = {"max_tokens": request.params.max_tokens, "temperature": 1.0, "seed": request.params.seed}
        alone = make_request("a", request.prompt, choice=request.choice, speculation="off", **fields)
        assert finished(drain, make_engine(), alone)[0] == ids

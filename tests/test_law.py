"""The law (DESIGN section 3) on real models: equal token ids whatever drafts, batches, chunks, pools and caches did.

The reference is each request alone, without speculation, in one chunk, with a cold cache.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from verdraft.kernels.blocks import Activations, Quantization
from verdraft.kernels.chooser import choose_kernels
from verdraft.kernels.native import NativeKV
from verdraft.model.eagle import EagleConfig, EagleHead, assemble_eagle
from verdraft.model.exit_head import Exits, own_exits
from verdraft.model.load import load_model
from verdraft.model.transformer import Transformer
from verdraft.scheduler.config import DraftShape, EngineConfig
from verdraft.scheduler.device import Device, HostDevice
from verdraft.scheduler.engine import NO_EXITS, DrafterFactory, Engine
from verdraft.scheduler.estimates import Estimates
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Mode, Request, Router
from verdraft.spec.draft import Drafter, NoDrafter
from verdraft.spec.patience import Patience
from verdraft.spec.predictor import new_predictor
from verdraft.spec.spending import CostTable

Job = tuple[list[int], SamplingParams]
MODES = ("off", "suffix", "auto", "prediction")
EXIT_MODES = ("early_exit", "hispec", "mixed")
EAGLE_MIXED = ("eagle", "suffix", "eagle", "hispec", "eagle", "off")
HYBRID_MIXED = ("hybrid", "suffix", "hybrid", "eagle", "hispec", "off", "hybrid", "early_exit")
MIXED = ("hispec", "suffix", "early_exit", "off")  # what the requests of one batch take turns in
TINY_POOL, LARGE_POOL = 7, 256  # blocks; the tiny one holds little more than the longest job (112 tokens)


class Setting(NamedTuple):
    """How the engine runs the jobs: steps between arrivals (0: one after the other), tokens per step, pool."""

    late: int
    chunk: int
    blocks: int


EVERY_SETTING = [Setting(*values) for values in itertools.product((0, 2), (24, 512), (TINY_POOL, LARGE_POOL))]
EVERY_PAIR = [setting for i, setting in enumerate(EVERY_SETTING) if i.bit_count() % 2 == 0]  # of values; half as many


def load(path: Path, quantization: Quantization = "none", activations: Activations = "float") -> Transformer:
    cpu = torch.device("cpu")
    kernels = choose_kernels("cpu", cpu, torch.float32, quantization, activations=activations)
    return load_model(path, kernels, torch.float32, cpu)


def engine_for(
    model: Transformer,
    num_blocks: int,
    max_batch_tokens: int,
    exits: Exits = NO_EXITS,
    drafters: DrafterFactory | None = None,
    eagle: EagleHead | None = None,
    topk: int = 1,
    router: Router = "payoff",
    device: Device | None = None,
) -> Engine:
    return Engine(
        model,
        EngineConfig(
            max_model_len=512,
            num_blocks=num_blocks,
            block_size=16,
            max_num_seqs=8,
            max_batch_tokens=max_batch_tokens,
            eos_token_ids=model.config.eos_token_ids,
            eagle=DraftShape(depth=4, topk=topk, tokens=8),
            router=router,
        ),
        drafters,
        exits,
        eagle,
        device,
    )


def run(engine: Engine, jobs: Sequence[Job], mode: str, answers: Sequence[Sequence[int]], late: int) -> list[list[int]]:
    """Outputs of all jobs; every `late` steps one more of them arrives (0: one after the other)."""
    outputs: dict[str, list[int]] = {}
    pending = [
        Request(
            id=str(i),
            prompt=prompt,
            params=params,
            speculation=mode_of(mode, i),
            prediction=tuple(answers[i]) if mode == "prediction" else (),
        )
        for i, (prompt, params) in enumerate(jobs)
    ]
    for step in itertools.count():
        if pending and (not engine.has_work or (late and step % late == 0)):
            engine.add(pending.pop(0))
        if not engine.has_work:
            break
        for request, piece in engine.step():
            outputs.setdefault(request.id, []).extend(piece.tokens)
            assert piece.finish != "error"
    engine.check_integrity()
    return [outputs[str(i)] for i in range(len(jobs))]


def mode_of(mode: str, i: int) -> Mode:
    """What the i-th request of a batch in this mode asks for."""
    mixtures = {"prediction": ["auto"], "mixed": MIXED, "eagle mixed": EAGLE_MIXED, "hybrid mixed": HYBRID_MIXED}
    taking_turns = mixtures.get(mode, [mode])
    found: Mode = taking_turns[i % len(taking_turns)]
    return found


def check_law(
    model: Transformer,
    jobs: Sequence[Job],
    settings: Sequence[Setting],
    modes: Sequence[str] = MODES,
    exits: Exits = NO_EXITS,
    device: Device | None = None,
) -> tuple[int, float]:
    """Run every mode, cold and warm, under each setting. The number of tokens compared, and the share of the exits'
    tokens that were accepted. The answers themselves are the CPU's, as it is."""
    compared = preempted = drafted = accepted = 0
    answers = run(engine_for(model, LARGE_POOL, 512), jobs, "off", (), late=0)
    for setting, mode in itertools.product(settings, modes):
        engine = engine_for(model, setting.blocks, setting.chunk, exits, device=device)
        for cache in ("cold", "warm"):
            found = run(engine, jobs, mode, answers, setting.late)
            assert found == answers, f"{setting} {mode=} {cache=}"
            compared += sum(map(len, found))
        preempted += engine.counters().num_preemptions
        drafted += engine.counters().spec["early_exit"].num_draft_tokens
        accepted += engine.counters().spec["early_exit"].num_accepted_tokens
    assert preempted > 0
    return compared, accepted / max(1, drafted)


def jobs_for(vocab: int, length: int, max_tokens: int) -> list[Job]:
    """Greedy and seeded requests; some share a prefix, some repeat themselves so that suffix drafts are frequent."""
    rnd = random.Random(0)
    shared = [rnd.randrange(20, vocab) for _ in range(length)]
    phrase = [rnd.randrange(20, vocab) for _ in range(6)]
    jobs: list[Job] = []
    for i in range(8):
        prompt = shared[: 4 * i] + phrase * (1 + i % 4) + [rnd.randrange(20, vocab) for _ in range(i)]
        greedy = i % 2 == 0
        params = SamplingParams(
            temperature=0.0 if greedy else 0.9,
            top_p=1.0 if i < 5 else 0.9,
            top_k=12 if i in (1, 7) else 0,
            min_p=0.02 if i in (3, 7) else 0.0,
            repetition_penalty=1.1 if i in (1, 3) else 1.0,
            presence_penalty=0.4 if i == 2 else 0.0,
            frequency_penalty=0.3 if i == 6 else 0.0,
            logit_bias={21: 1.5, 22 + i: -2.0} if i in (2, 4, 7) else {},
            seed=i,
            max_tokens=max_tokens,
            ignore_eos=i % 3 == 0,
            min_tokens=3 if i > 2 else 0,
            logprobs=2 if i in (2, 6) else None,
            prompt_logprobs=1 if i == 5 else None,
        )
        jobs.append((prompt, params))
    return jobs


@pytest.fixture(params=["host", "late"])
def device(request: pytest.FixtureRequest, late_device: Any) -> Iterator[Device]:
    """The CPU, and the CPU as if it were a GPU: fed in one copy, asked late, and for tokens where it can tell them."""
    late = late_device()
    yield HostDevice() if request.param == "host" else late
    assert (late.drawn > 0) is (request.param == "late")


@pytest.mark.parametrize(
    ("device", "family", "settings"),
    [("host", "llama", EVERY_SETTING), ("late", "llama", EVERY_PAIR), ("host", "qwen3", EVERY_PAIR)],
    indirect=["device"],
)
def test_tiny_models_keep_the_law(
    family: str, settings: Sequence[Setting], device: Any, request: pytest.FixtureRequest
) -> None:
    model = load(request.getfixturevalue(f"tiny_{family}_path"))
    jobs = jobs_for(model.config.vocab_size, 40, 24)
    assert check_law(model, jobs, settings, device=device)[0] > 600 * len(settings)
    assert isinstance(device, HostDevice) or (device.drawn > 100 * len(settings) and not device.asked)


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_models_keep_the_law(
    tiny_llama_path: Path, quantization: Quantization, activations: Activations
) -> None:
    """The model that the law speaks of is the quantised one."""
    model = load(tiny_llama_path, quantization, activations)
    assert check_law(model, jobs_for(model.config.vocab_size, 40, 24), EVERY_PAIR)[0] > 2500


@pytest.mark.parametrize(("kind", "least", "most"), [("llama", 0.0, 0.3), ("agreeing", 0.5, 1.0)])
def test_exits_keep_the_law(
    kind: str, least: float, most: float, device: Device, request: pytest.FixtureRequest
) -> None:
    """Exits that are nearly always wrong, and exits that are right more often than not."""
    model = load(request.getfixturevalue(f"deep_{kind}_path"))
    settings = [Setting(late=2, chunk=24, blocks=TINY_POOL)]
    jobs = jobs_for(model.config.vocab_size, 40, 18)
    compared, accepted = check_law(model, jobs, settings, EXIT_MODES, own_exits(model, (1, 2)), device)
    assert compared > 500
    assert least <= accepted <= most


@pytest.mark.parametrize(("path", "modes"), [("tiny_qwen3_path", ["off"]), ("deep_agreeing_path", ["mixed"])])
def test_trees_keep_the_law(
    path: str, modes: list[str], device: Device, scripted_trees: Any, scripted: Any, request: pytest.FixtureRequest
) -> None:
    """Trees, chains and no drafts in one batch; with exits in three segments, beside windows."""
    model = load(request.getfixturevalue(path))
    exits = own_exits(model, (1, 2)) if modes == ["mixed"] else NO_EXITS
    jobs = jobs_for(model.config.vocab_size, 40, 24)
    answers = run(engine_for(model, LARGE_POOL, 512), jobs, "off", (), late=0)

    def drafter(job: Request) -> Drafter:
        i = int(job.id)
        kind = [NoDrafter, scripted, scripted_trees, scripted_trees][i // 2 % 4]
        return NoDrafter() if kind is NoDrafter else kind(answers[i], 0.2, i, model.config.vocab_size)

    accepted = 0
    for late, chunk, blocks in [(2, 24, TINY_POOL), (2, 512, LARGE_POOL)]:
        engine = engine_for(model, blocks, chunk, exits, drafter, device=device)
        assert run(engine, jobs, modes[0], answers, late) == answers
        accepted += engine.counters().spec["eagle"].num_accepted_tokens
    assert accepted > 40


@pytest.mark.parametrize(
    ("device", "kind", "topk"),
    [*itertools.product(["host"], ["random", "right"], [1, 3]), ("late", "random", 1), ("late", "right", 3)],
    indirect=["device"],
)
def test_eagle_keeps_the_law(
    kind: str,
    topk: int,
    device: Device,
    bigram_path: Path,
    first_layer_eagle: Any,
    tiny_eagle: EagleConfig,
    eagle_tensors: Any,
) -> None:
    """A head that is nearly always wrong and one that is mostly right, chains and trees, alone and among others."""
    model = load(bigram_path)
    rnd = np.random.default_rng(0)
    random_head = assemble_eagle(tiny_eagle, eagle_tensors(tiny_eagle, 100), np.sort(rnd.permutation(320)[:100]), model)
    eagle = random_head if kind == "random" else first_layer_eagle(bigram_path, model)
    jobs = jobs_for(model.config.vocab_size, 40, 24)
    answers = run(engine_for(model, LARGE_POOL, 512), jobs, "off", (), late=0)
    drafted = accepted = 0
    for mode, chunk, blocks in [("eagle", 512, LARGE_POOL), ("eagle mixed", 24, TINY_POOL)]:
        engine = engine_for(model, blocks, chunk, own_exits(model, (1, 2)), eagle=eagle, topk=topk, device=device)
        for cache in ("cold", "warm"):
            assert run(engine, jobs, mode, answers, late=2) == answers, f"{mode} {cache}"
        drafted += engine.counters().spec["eagle"].num_draft_tokens
        accepted += engine.counters().spec["eagle"].num_accepted_tokens
    assert drafted > 300
    assert accepted > (0 if kind == "random" else 100)


def check_hybrid(
    path: Path, mode: str, eagle_of: Any, device: Device, set_up: Callable[[Engine], None], router: Router = "payoff"
) -> int:
    """All sources at once, in two pools; how often the predictor was asked where that was least."""
    model = load(path)
    jobs = jobs_for(model.config.vocab_size, 40, 24)
    answers = run(engine_for(model, LARGE_POOL, 512), jobs, "off", (), late=0)
    drafted: Counter[str] = Counter()
    asked = []
    for late, chunk, blocks in [(0, 512, LARGE_POOL), (2, 24, TINY_POOL)]:
        eagle, exits = eagle_of(path, model), own_exits(model, (1, 2))
        engine = engine_for(model, blocks, chunk, exits, eagle=eagle, topk=2, router=router, device=device)
        set_up(engine)
        for cache in ("cold", "warm"):
            assert run(engine, jobs, mode, answers, late) == answers, cache
        drafted.update({source: stats.num_draft_tokens for source, stats in engine.counters().spec.items()})
        asked.append(engine.counters().predictor.num_states)
    assert min(drafted[source] for source in ("suffix", "early_exit", "eagle")) > 10
    return min(asked)


@pytest.mark.parametrize(
    ("device", "router"),
    [("host", "payoff"), ("host", "threshold"), ("host", "score"), ("late", "payoff")],
    indirect=["device"],
)
def test_hybrid_keeps_the_law(router: Router, device: Device, bigram_path: Path, first_layer_eagle: Any) -> None:
    """Sources chosen by a predictor that knows nothing and learns nonsense with every label; beside requests that want
    one of them or none."""

    def set_up(engine: Engine) -> None:
        engine.drafting.costs = CostTable((1, 32), (1.0, 2.0))  # so that not everything pays
        engine.drafting.estimates = changing_estimates()

    assert check_hybrid(bigram_path, "hybrid mixed", first_layer_eagle, device, set_up, router) > 20


@pytest.mark.parametrize("device", ["late"], indirect=True)
def test_drafts_between_passes_that_wait_for_none_keep_the_law(
    device: Any, bigram_path: Path, first_layer_eagle: Any, fickle_patience: type[Patience]
) -> None:
    """A pass that takes its tokens from the one before it, behind passes with windows, trees and features, and before
    others."""

    def set_up(engine: Engine) -> None:
        engine.drafting.costs = CostTable((1, 32), (1.0, 1.2))
        engine._lookahead._patience = fickle_patience()

    check_hybrid(bigram_path, "hybrid", first_layer_eagle, device, set_up)
    assert device.ahead > 20


def changing_estimates() -> Estimates:
    """Of another random predictor after every label: online learning at its wildest."""
    rng = np.random.default_rng(1)
    estimates = Estimates(new_predictor(rng, hidden=8))
    estimates.teach = lambda state: estimates.use(new_predictor(rng, hidden=8))
    return estimates


def kv_rows(engine: Engine, blocks: Sequence[int], count: int) -> list[torch.Tensor]:
    """K and V of the first `count` tokens in these blocks, layer by layer."""
    pages = torch.tensor(blocks)
    rows = []
    for layer in engine._runner.pool:
        assert isinstance(layer, NativeKV), "this test knows the native kernels' layout"
        run = layer.k.shape[2]  # pages of a run
        places = (pages // run, slice(None), pages % run)
        k, v = layer.k[places].permute(0, 3, 1, 2)[:, :16], layer.v[places].permute(0, 2, 1, 3)
        rows += [part.flatten(0, 1)[:count].clone() for part in (k, v)]
    return rows


def kv_compared(model: Transformer, engine: Engine, job: Job, mode: Any) -> int:
    """After how many steps the KV of all that is computed was that of plain decoding; it must be after every one."""
    prompt, params = job
    plain = engine_for(model, LARGE_POOL, 512)
    plain.add(Request(id="plain", prompt=prompt, params=params, speculation="off"))
    engine.add(Request(id="0", prompt=prompt, params=params, speculation=mode))
    expected: list[torch.Tensor] = []
    while plain.has_work:
        blocks = list(plain.scheduler.running[0].blocks) if plain.scheduler.running else []
        plain.step()
        expected = kv_rows(plain, blocks, 1000) if blocks else []
    compared = 0
    while engine.has_work:
        engine.step()
        for seq in engine.scheduler.running:
            found = kv_rows(engine, seq.blocks, seq.computed[-1])
            assert all(torch.equal(a, b[: len(a)]) for a, b in zip(found, expected, strict=True))
            compared += 1
    return compared


def test_trees_leave_the_kv_of_plain_decoding(device: Device, deep_llama_path: Path, scripted_trees: Any) -> None:
    """Accepted paths are laid out as chains bit for bit, in every layer."""
    model = load(deep_llama_path)
    job = jobs_for(model.config.vocab_size, 40, 40)[3]
    answer = run(engine_for(model, LARGE_POOL, 512), [job], "off", (), late=0)[0]
    engine = engine_for(model, LARGE_POOL, 24, NO_EXITS, lambda _: scripted_trees(answer, 0.1, 5, 320), device=device)
    assert kv_compared(model, engine, job, "off") > 5
    assert engine.counters().spec["eagle"].num_accepted_tokens > 20


@pytest.mark.parametrize("mode", ["early_exit", "hispec"])
@pytest.mark.parametrize("kind", ["llama", "agreeing"])
def test_exits_leave_the_kv_of_plain_decoding(
    kind: str, mode: str, device: Device, request: pytest.FixtureRequest
) -> None:
    """After every cycle, bit for bit: rejected tokens leave nothing behind at any committed position."""
    model = load(request.getfixturevalue(f"deep_{kind}_path"))
    engine = engine_for(model, LARGE_POOL, 24, own_exits(model, (1, 2)), device=device)
    assert kv_compared(model, engine, jobs_for(model.config.vocab_size, 40, 40)[3], mode) > 10
    assert engine.counters().spec["early_exit"].num_draft_tokens > 0


@pytest.mark.demo
@pytest.mark.parametrize(("device", "activations"), [("host", "float"), ("late", "int8")], indirect=["device"])
def test_the_demo_model_keeps_the_law(device: Device, demo_path: Path, activations: Activations) -> None:
    model = load(demo_path, "auto", activations)  # as it is served: blocks for few rows, fp32 panels for more
    settings = [Setting(late=2, chunk=24, blocks=TINY_POOL)]
    assert check_law(model, jobs_for(2000, 40, 20), settings, device=device)[0] > 300


@pytest.mark.demo
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_the_demo_model_keeps_the_law_in_every_setting(
    device: Device, demo_path: Path, activations: Activations
) -> None:
    torch.set_num_threads(2)
    model = load(demo_path, "auto", activations)  # as it is served: blocks for few rows, fp32 panels for more
    assert check_law(model, jobs_for(2000, 40, 52), EVERY_SETTING, device=device)[0] > 20000

"""The law for answers that a grammar binds, on real models: equal ids whatever drafts, batches and pools did."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from verdraft.kernels.chooser import choose_kernels
from verdraft.model.exit_head import Exits, own_exits
from verdraft.model.load import load_model
from verdraft.model.transformer import Transformer
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.device import Device, HostDevice
from verdraft.scheduler.engine import NO_EXITS, DrafterFactory, Engine
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Request
from verdraft.spec.draft import Drafter

SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {
            "tab": {"enum": ["abc", "ab"]},
            "ren": {"type": "integer", "minimum": -999, "maximum": 999},
            "subs": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        },
        "required": ["tab", "ren", "subs"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"const": "nut"}, {"type": "integer"}]}, "maxItems": 5},
)
NUM_JOBS = 6


def job(i: int) -> tuple[list[int], SamplingParams, dict[str, Any]]:
    """Greedy and seeded, with parameters that a grammar must live with."""
    params = SamplingParams(
        temperature=0.0 if i % 2 else 0.9,
        top_p=0.95 if i == 4 else 1.0,
        top_k=9 if i in (2, 4) else 0,
        repetition_penalty=1.1 if i == 3 else 1.0,
        logit_bias=dict.fromkeys(range(60), -100.0) if i == 1 else {},
        min_tokens=12 if i == 2 else 0,
        ignore_eos=i == 5,
        seed=i,
        logprobs=3 if i in (1, 4) else None,
        max_tokens=48,
    )
    return [30 + i, *range(40, 60 + 2 * i)], params, SCHEMAS[i % 2]


def run(
    model: Transformer,
    exits: Exits,
    vocabulary: Any,
    mode: str,
    answers: Sequence[Sequence[int]],
    late: int,
    drafters: DrafterFactory | None = None,
    device: Device | None = None,
) -> list[list[int]]:
    """All jobs, every `late` steps one more; 0: one after the other. In turns with two: cold and warm caches."""
    config = EngineConfig(
        max_model_len=256,
        num_blocks=12 if late else 64,
        max_num_seqs=8,
        max_batch_tokens=48,
        eos_token_ids=frozenset({0}),
    )
    engine = Engine(model, config, drafters, exits=exits, device=device)
    outputs: dict[str, list[int]] = {}
    pending = [(turn, i) for turn in "ab" for i in range(NUM_JOBS)]
    for step in itertools.count():
        if pending and (not engine.has_work or (late and step % late == 0)):
            turn, i = pending.pop(0)
            prompt, params, schema = job(i)
            predicted = tuple(answers[i]) if mode == "prediction" else ()
            engine.add(
                Request(
                    id=f"{turn}{i}",
                    prompt=prompt,
                    params=params,
                    speculation="auto" if mode == "prediction" else mode,  # type: ignore[arg-type]
                    prediction=predicted,
                    constraint=vocabulary.constraint(schema),
                )
            )
        if not engine.has_work:
            break
        for request, piece in engine.step():
            assert piece.finish != "error"
            outputs.setdefault(request.id, []).extend(piece.tokens)
    engine.check_integrity()
    assert [outputs[f"a{i}"] for i in range(NUM_JOBS)] == [outputs[f"b{i}"] for i in range(NUM_JOBS)]
    return [outputs[f"a{i}"] for i in range(NUM_JOBS)]


@pytest.fixture(params=["host", "late"])
def device(request: pytest.FixtureRequest, late_device: Any) -> Device:
    """The CPU, and the CPU as a GPU that knows no grammar."""
    device: Device = HostDevice() if request.param == "host" else late_device()
    return device


DRAFTS = [("off", 2), ("suffix", 0), ("auto", 2), ("prediction", 2)]
EXITS = [("early_exit", 0), ("hispec", 2), ("prediction", 2)]


@pytest.mark.parametrize(
    ("path", "settings", "device"),
    [
        ("tiny_llama_path", DRAFTS, "host"),
        ("tiny_qwen3_path", DRAFTS, "late"),
        ("deep_agreeing_path", EXITS, "host"),
        ("deep_agreeing_path", EXITS, "late"),
    ],
    indirect=["device"],
)
def test_grammars_keep_the_law(
    path: str,
    settings: list[tuple[str, int]],
    device: Device,
    wide_json_vocabulary: Any,
    request: pytest.FixtureRequest,
) -> None:
    cpu = torch.device("cpu")
    kernels = choose_kernels("cpu", cpu, torch.float32, "none")
    model = load_model(request.getfixturevalue(path), kernels, torch.float32, cpu)
    exits = own_exits(model, (1, 2)) if settings is EXITS else NO_EXITS
    answers = run(model, exits, wide_json_vocabulary, "off", (), late=0)
    whole = [i for i, answer in enumerate(answers) if len(answer) < 48]
    assert whole
    for i in whole:
        jsonschema.validate(json.loads(wide_json_vocabulary.text(answers[i])), SCHEMAS[i % 2])
    for mode, late in settings:
        found = run(model, exits, wide_json_vocabulary, mode, answers, late, device=device)
        assert found == answers, f"{mode=} {late=}"


def test_trees_in_a_grammar_keep_the_law(
    device: Device, tiny_llama_path: Path, wide_json_vocabulary: Any, scripted_trees: Any
) -> None:
    cpu = torch.device("cpu")
    model = load_model(tiny_llama_path, choose_kernels("cpu", cpu, torch.float32, "none"), torch.float32, cpu)
    answers = run(model, NO_EXITS, wide_json_vocabulary, "off", (), late=0)

    def drafter(request: Request) -> Drafter:
        drafter: Drafter = scripted_trees(answers[int(request.id[1:])], 0.2, request.id[0] == "a", 320)
        return drafter

    assert run(model, NO_EXITS, wide_json_vocabulary, "suffix", answers, 2, drafter, device) == answers

"""The part of bench/gpu.py that measures an engine: decoding and every mode of drafts, requests side by side.

The model is random, but its upper layers add little, so that early exits have something to be right about. How often
drafts are right on real text is not to be learned here; what a cycle costs is.
"""

import random
import time
from collections.abc import Iterator
from typing import Final

from verdraft.bench.gpu_form import can_record, recorder
from verdraft.bench.gpu_meter import Line
from verdraft.bench.gpu_model import random_model
from verdraft.bench.gpu_parts import SHORT, Bench, num_weights
from verdraft.model.exit_head import own_exits
from verdraft.model.recordings import with_recordings
from verdraft.model.transformer import Transformer
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Mode, Request

MODES: Final[tuple[Mode, ...]] = ("off", "suffix", "hispec", "hybrid")
PROMPT: Final = 32  # tokens, half of them twice
SPARE: Final = 64  # tokens of drafts at the end of a context


def engine_modes(bench: Bench) -> Iterator[Line]:
    """Time for a token, all requests together, from their coming to their end; as it is and with recorded passes."""
    meter, layers = bench.meter, bench.sizes.config.num_layers
    exit_layers = max(1, layers // 8), max(2, layers // 4)
    model = random_model(bench.sizes.config, bench.kernels, meter.dtype, meter.device, quiet=exit_layers[0])
    yield from _modes(bench, model, exit_layers, "")
    if can_record(bench.kernels, meter.device):
        yield from _modes(bench, with_recordings(model, recorder(meter.device)), exit_layers, ", recorded")


def _modes(bench: Bench, model: Transformer, exit_layers: tuple[int, int], suffix: str) -> Iterator[Line]:
    config = _config(bench)
    engine = Engine(model, config, exits=own_exits(model, exit_layers))
    engine.measure()
    for rows in (rows for rows in bench.sizes.rows if rows in SHORT):
        # A pass that reads the weights gives every request a token.
        floor = bench.meter.floor_us(num_weights(model.config) * bench.form.weight_bytes(model.dtype) / rows, 0)
        for mode in MODES:
            _answer(engine, mode, rows, bench.sizes.answer, "warm")
            before = engine.counters()
            seconds = _answer(engine, mode, rows, bench.sizes.answer, "timed")
            now = engine.counters()
            tokens = now.generation_tokens - before.generation_tokens
            # The first token of each comes from its prompt's pass.
            per_pass = (tokens - rows) / max(1, now.target_passes - before.target_passes)
            case = f"{mode}, {rows} requests{suffix}"
            us = 1e6 * seconds / tokens
            yield Line("engine", bench.name, case, us, floor, short=True, detail=f"{per_pass:.1f} tokens a pass")


def _config(bench: Bench) -> EngineConfig:
    length, size, rows = PROMPT + bench.sizes.answer + SPARE, bench.kernels.page_size, max(SHORT)
    return EngineConfig(
        max_model_len=length,
        num_blocks=rows * -(-length // size),
        block_size=size,
        max_num_seqs=rows,
        max_batch_tokens=512,
    )


def _answer(engine: Engine, mode: Mode, rows: int, tokens: int, seed: str) -> float:
    """Seconds until all requests have their tokens. Prompts are new for every seed: no cache has seen them."""
    draw = random.Random(f"{seed} {mode} {rows}")
    for number in range(rows):
        phrase = draw.choices(range(256), k=PROMPT // 2)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        engine.add(Request(id=str(number), prompt=phrase * 2, params=params, speculation=mode))
    began = time.perf_counter()
    while engine.has_work:
        failed = [request.id for request, piece in engine.step() if piece.finish == "error"]
        if failed:
            raise RuntimeError(f"requests {failed} failed in mode {mode}")
    return time.perf_counter() - began

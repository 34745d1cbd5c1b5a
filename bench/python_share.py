"""How much of a step for one sequence is Python and tensors: steps of an engine whose C++ functions return at once,
against real ones."""

import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from verdraft.bench.timing import CPU
from verdraft.kernels.chooser import choose_kernels
from verdraft.kernels.cpu import CpuKernels
from verdraft.kernels.native import SIGNATURES, NativeOps
from verdraft.model.load import load_model
from verdraft.model.transformer import Transformer
from verdraft.scheduler.config import EngineConfig
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.params import SamplingParams
from verdraft.scheduler.request import Request

STEPS = 200
# Products leave zeros, because a step fails over logits that are not finite.
PRODUCTS = """
#include <string.h>
long verdraft_lanes() { return 16; }
long verdraft_panel_width() { return 32; }
long verdraft_run() { return 16; }
void verdraft_linear(float* x, long stride, float* w, float* b, float* out, long rows, long ins, long outs) {
  memset(out, 0, 4 * rows * outs);
}
void verdraft_block_linear(long bits, float* x, long stride, void* w, float* b, float* out, long rows, long ins,
                           long outs) {
  memset(out, 0, 4 * rows * outs);
}
"""


def print_share(folder: Path, context: int) -> None:
    """One line; greedy decoding without drafts after a prompt of `context` tokens."""
    real = _step(load_model(folder, choose_kernels("cpu", CPU, torch.float32, "auto"), torch.float32, CPU), context)
    with tempfile.TemporaryDirectory() as scratch:
        kernels = CpuKernels(NativeOps(_library_of_nothing(Path(scratch))), "auto")
        null = _step(load_model(folder, kernels, torch.float32, CPU), context)
    print(
        f"{'a step, 1 row':16}{real * 1e3:8.2f} ms, of which Python and tensors {null * 1e3:.2f} ms: {null / real:.1%}"
    )


def _step(model: Transformer, context: int) -> float:
    """Median seconds."""
    config = EngineConfig(max_model_len=context + STEPS, num_blocks=(context + STEPS) // 16 + 2)
    engine, seconds = Engine(model, config), []
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    engine.add(Request(id="a", prompt=[*range(100, 100 + context)], params=params, speculation="off"))
    while engine.has_work:
        started = time.perf_counter()
        pieces = engine.step()
        seconds.append(time.perf_counter() - started)
        assert all(piece.finish != "error" for _, piece in pieces)
    return statistics.median(seconds[-STEPS + 1 :])


def _library_of_nothing(scratch: Path) -> Path:
    """Every function of the C++ library, none of which computes anything."""
    others = [name for name in SIGNATURES if name not in PRODUCTS]
    source, library = scratch / "nothing.c", scratch / "nothing.so"
    source.write_text(PRODUCTS + "".join(f"void {name}() {{}}\n" for name in others))
    command = ["gcc", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    return library

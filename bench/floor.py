"""A pass over few rows against the time of only reading what it reads, in turns: the machine's read speed may swing by
half within a minute, the ratio of neighbours does not."""

import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verdraft.bench.timing import CPU, one_sequence
from verdraft.kernels.base import KernelUnavailable
from verdraft.kernels.blocks import Activations, Quantization
from verdraft.kernels.chooser import choose_kernels
from verdraft.kernels.hugepages import HugePages
from verdraft.kernels.packed import TwoPacks
from verdraft.model.load import load_model
from verdraft.model.transformer import Transformer

ROWS = (1, 2, 4, 8, 16, 32)
FORMS: tuple[tuple[Quantization, Activations], ...] = (("none", "float"), ("auto", "float"), ("auto", "int8"))
TURNS = 60
PAGE = 16
# The best plain loop: each of torch's threads runs through its part in whole lines of the cache.
READER = """
#include <omp.h>
typedef float Line __attribute__((vector_size(64)));
float read_all(const Line* p, long lines) {
  float total = 0;
  const long parts = omp_get_max_threads();
#pragma omp parallel for reduction(+ : total)
  for (long part = 0; part < parts; ++part) {
    Line sums[8] = {};
    const Line* end = p + lines / 8 * (part + 1) / parts * 8;
    for (const Line* at = p + lines / 8 * part / parts * 8; at < end; at += 8)
      for (int i = 0; i < 8; ++i) sums[i] += at[i];
    for (int i = 0; i < 8; ++i) total += sums[i][0];
  }
  return total;
}
"""


def print_floors(folder: Path, context: int) -> None:
    """For fp32 and for exact blocks, these also by rounded inputs: medians, and quartiles of the ratios."""
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        reader = _reader(Path(scratch))
        for quantization, activations in FORMS:
            try:
                kernels = choose_kernels("cpu", CPU, torch.float32, quantization, activations=activations)
                model = load_model(folder, kernels, torch.float32, CPU)
            except KernelUnavailable as error:
                print(error)
                continue
            _print_floor(f"{quantization} {activations}", model, context, reader)


def _print_floor(form: str, model: Transformer, context: int, reader: Any) -> None:
    area = HugePages().zeros(bytes_read(model, context) // 64, 16).fill_(1)
    passes = [_pass(model, rows, context) for rows in ROWS]
    read, *times = _turns([partial(reader, area.data_ptr(), len(area)), *passes])
    print(f"{form:10} {area.nbytes / 1e6:.0f} MB, read in {statistics.median(read) * 1e3:.2f} ms; a pass of")
    for rows, own in zip(ROWS, times, strict=True):
        of_read, of_one = _quartiles(own, read), _quartiles(own, times[0])
        milliseconds = statistics.median(own) * 1e3
        print(f"  {rows} rows {milliseconds:6.2f} ms, of reading {of_read}, of 1 row {of_one}", flush=True)


def bytes_read(model: Transformer, context: int) -> int:
    """What a pass over one row cannot but read: weights, once, and the context's keys and values."""
    packed = [part for layer in model.layers for part in (layer.qkv, layer.output, layer.up, layer.down)]
    own = [part.blocks if isinstance(part, TwoPacks) else part for part in (*packed, model.head)]
    return sum(part.panels.nbytes for part in own) + context * model.kv_bytes_per_token


def _pass(model: Transformer, rows: int, context: int) -> Callable[[], Tensor]:
    """The last `rows` tokens of a context, from their embedding to their logits."""
    pages, tokens = -(-context // PAGE), torch.arange(rows)
    batch, pool = one_sequence(rows, context, pages), model.new_pool(pages, PAGE)
    layers = model.config.num_layers
    return lambda: model.logits(model.forward(model.embed(tokens, batch.positions), batch, pool, 0, layers))


def _turns(calls: Sequence[Callable[[], object]]) -> list[list[float]]:
    """Seconds of each call in each turn."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(TURNS):
        for call, own in zip(calls, times, strict=True):
            started = time.perf_counter()
            call()
            own.append(time.perf_counter() - started)
    return [own[TURNS // 10 :] for own in times]  # the first ones touch new memory


def _quartiles(times: Sequence[float], others: Sequence[float]) -> str:
    low, median, high = statistics.quantiles([a / b for a, b in zip(times, others, strict=True)])
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def _reader(scratch: Path) -> Any:
    source, unit, library = scratch / "reader.c", scratch / "reader.o", scratch / "reader.so"
    source.write_text(READER)
    compiling = ["gcc", "-O3", "-march=native", "-fopenmp", "-fPIC", "-c", str(source), "-o", str(unit)]
    # Linked without -fopenmp, as build.py does: the threads are then torch's.
    torch_libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    for command in (compiling, ["gcc", "-shared", str(unit), *torch_libraries, "-o", str(library)]):
        subprocess.run(command, check=True, timeout=60)
    reader = ctypes.CDLL(str(library)).read_all
    reader.argtypes, reader.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_float
    return reader

"""The parts of bench/gpu.py as jobs: which there are, each in a process of its own, and what they leave behind."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch

from verdraft.bench.gpu_form import Form
from verdraft.bench.gpu_meter import Line, Meter, Speeds
from verdraft.bench.gpu_parts import (
    Bench,
    Part,
    Sizes,
    attention,
    floor,
    passes,
    products,
    sampling,
    speeds_of,
)
from verdraft.kernels.chooser import versions


def engine(bench: Bench) -> Iterator[Line]:
    """gpu_engine.engine_modes, imported in the part's own process: a package that it lacks stops no other part."""
    from verdraft.bench.gpu_engine import engine_modes

    yield from engine_modes(bench)


PARTS: Final[Mapping[str, Part]] = {
    "floor": floor,
    "attention": attention,
    "products": products,
    "passes": passes,
    "sampling": sampling,
    "engine": engine,
}
SECONDS: Final = {"floor": 20, "attention": 30, "products": 15, "passes": 45, "sampling": 15, "engine": 80}  # at most
LEAST: Final = 2.0  # seconds; with fewer a part does not even begin


@dataclass(frozen=True, slots=True)
class Job:
    """One part of one form, and the seconds it may take."""

    part: str
    form: Form
    seconds: float

    def __str__(self) -> str:
        return f"{self.part} with {self.form}"


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and what the parts measure."""

    device: torch.device
    sizes: Sizes

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32

    def meter(self, speeds: Speeds | None) -> Meter:
        """As thorough as it may be there."""
        probe, budget = (8192, 0.05) if self.on_gpu else (64, 0.0)
        return Meter(self.device, self.dtype, probe, budget, speeds)


@dataclass(slots=True)
class Result:
    """What was found so far, in `path` too whenever `write` was called."""

    path: Path
    device: str
    notes: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    def note(self, text: str) -> None:
        """For the reader of either."""
        self.notes.append(text)
        print(f"# {text}", flush=True)

    def write(self) -> None:
        """Whole or not at all."""
        lines = [asdict(line) for line in self.lines]
        found = {"device": self.device, "versions": dict(versions()), "notes": self.notes, "lines": lines}
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(found, indent=1))
        fresh.replace(self.path)


def plan(found: Sequence[Form]) -> Iterator[Job]:
    """All parts of all forms, what matters most first."""
    small = [form for form in found if form.quantization != "none"]
    quick = [form for form in found if not form.deterministic and form not in small]
    exact = [form for form in found if form.deterministic]
    best, first = quick[:1], [*quick[:1], *exact[:1]]
    order = [("floor", best), ("passes", best), ("engine", best), ("attention", first)]
    order += [("products", [*first, *small]), ("sampling", best), ("passes", exact[:1]), ("engine", exact[:1])]
    # The last of the quick ones is the reference: whole passes take it long.
    order += [("passes", [*small, *quick[1:-1]]), ("attention", quick[1:]), ("engine", small)]
    return (Job(part, form, SECONDS[part]) for part, some in order for form in some)


def run(jobs: Sequence[Job], setting: Setting, seconds: float, result: Result) -> None:
    """One after the other, as far as the time goes."""
    ends = time.monotonic() + seconds
    with TemporaryDirectory() as folder:
        for number, job in enumerate(jobs):
            left = min(job.seconds, ends - time.monotonic())
            if left < LEAST:
                result.note(f"no time for {job}")
            else:
                _run(replace(job, seconds=left), setting, Path(folder) / f"{number}.jsonl", result)
            result.write()


def _run(job: Job, setting: Setting, found: Path, result: Result) -> None:
    # A server process imports torch once and forks a fresh child for every part; it never touches a GPU itself.
    context = get_context("forkserver")
    context.set_forkserver_preload(["verdraft.bench.gpu_jobs"])
    process = context.Process(target=work, args=(job, setting, speeds_of(result.lines), found))
    process.start()
    process.join(job.seconds)
    if process.is_alive():
        process.kill()
        process.join()
        result.note(f"{job}: stopped after {job.seconds:.0f} s")
    elif process.exitcode:
        result.note(f"{job}: ended with code {process.exitcode}")
    result.lines += _read(found, result)


def _read(path: Path, result: Result) -> Iterator[Line]:
    """What a part left, which may have been stopped in the middle of a line."""
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(text)
        except json.JSONDecodeError:
            return
        if note := entry.get("note"):
            result.note(note)
        else:
            yield Line(**entry)


def work(job: Job, setting: Setting, speeds: Speeds | None, found: Path) -> None:
    """In a process of its own: a part's lines, and how it ended."""
    with found.open("a", buffering=1) as file, torch.inference_mode():
        try:
            kernels = job.form.kernels(setting.device, setting.dtype)
            bench = Bench(setting.meter(speeds), setting.sizes, job.form, kernels)
            for line in PARTS[job.part](bench):
                print(line, flush=True)
                print(json.dumps(asdict(line)), file=file)
        except Exception as error:
            text = f"{job} ended: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            print(json.dumps({"note": text}), file=file)
        if setting.on_gpu:
            peak = f"{job}: peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
            print(json.dumps({"note": peak}), file=file)

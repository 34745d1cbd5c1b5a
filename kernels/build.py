"""Builds this folder's C++ once per machine and torch into one shared library, whose functions it does not know."""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch

_FOLDER: Final = Path(__file__).parent
SOURCES: Final = tuple(
    _FOLDER / f"{name}.cpp"
    for name in ("attention", "choice", "layers", "ops", "payoff", "product", "quantized", "rounded", "suffix")
)
_HEADERS: Final = tuple(_FOLDER / name for name in ("operations.h", "threads.h", "vectors.h"))
# -ffp-contract=off: else the compiler fuses multiply-adds in some instances of a template and not in others.
FLAGS: Final = ("-O3", "-std=c++20", "-ffp-contract=off", "-fPIC", "-fopenmp")


class NativeUnavailable(RuntimeError):
    """The C++ operations cannot be built or loaded here; the message says why."""


def build_native(folder: Path | None = None) -> Path:
    """The shared library for these sources, machine and torch; compiled into `folder` (default: the user's cache)
    on first use, in seconds. Several processes may race: each builds its own and the last rename wins.

    The variable CXX names the compiler and may go on with flags; "g++ -march=x86-64-v3" builds for other processors
    than this one. Raises NativeUnavailable when there is no compiler or it fails.
    """
    compiler = _compiler()
    folder = folder or _cache_folder()
    path = folder / f"ops-{_build_key(compiler)}.so"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            os.replace(_compile(compiler, Path(scratch)), path)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        raise NativeUnavailable(f"{compiler[0]} could not build the CPU operations: {detail.strip()[-400:]}") from error
    return path


def _compiler() -> tuple[str, ...]:
    """The command that compiles, with its flags for this processor."""
    wanted, *flags = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    path = shutil.which(wanted)
    if path is None:
        raise NativeUnavailable(f"no C++ compiler {wanted!r} on the path")
    processor = () if any(flag.startswith(("-march=", "-mcpu=")) for flag in flags) else ("-march=native",)
    return path, *flags, *processor


def _compile(compiler: tuple[str, ...], scratch: Path) -> Path:
    torch_folder = Path(torch.__file__).parent
    include = f"-I{torch_folder / 'include'}"
    units = [scratch / f"{source.stem}.o" for source in SOURCES]
    with ThreadPoolExecutor(len(units)) as pool:
        jobs = [
            pool.submit(_run, compiler[0], *FLAGS, *compiler[1:], "-c", include, str(source), "-o", str(unit))
            for source, unit in zip(SOURCES, units, strict=True)
        ]
        for job in jobs:
            job.result()
    library, libraries = scratch / "ops.so", (f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10")
    # Linked without -fopenmp: the symbols then come from the OpenMP that torch has loaded, not from a second one.
    _run(*compiler, "-shared", *map(str, units), *libraries, "-o", str(library))
    return library


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "verdraft" / "native"


def _build_key(compiler: tuple[str, ...]) -> str:
    texts = [path.read_text() for path in (*SOURCES, *_HEADERS)]
    parts = (*texts, " ".join(FLAGS), " ".join(compiler), torch.__version__, _cpu_flags())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _cpu_flags() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())

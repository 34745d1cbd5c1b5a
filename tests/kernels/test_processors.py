"""The C++ for processors that only an emulator offers here: compiled without torch, with a check of its own."""

import shutil
import subprocess
from pathlib import Path

import pytest

from verdraft.kernels.build import FLAGS, SOURCES

CHECK = Path(__file__).parent / "portable"
TARGETS = {
    "aarch64": ("aarch64-linux-gnu-g++ -march=armv8-a", "qemu-aarch64-static", 4),
    "without-avx": ("g++ -march=nehalem", "qemu-x86_64-static -cpu Nehalem", 4),
    "without-avx2": ("g++ -march=sandybridge", "qemu-x86_64-static -cpu SandyBridge", 8),
    "avx2": ("g++ -march=haswell", "qemu-x86_64-static -cpu Haswell", 8),
}


@pytest.mark.long
@pytest.mark.parametrize(("compiler", "emulator", "lanes"), TARGETS.values(), ids=TARGETS.keys())
def test_rows_are_right_and_their_own(tmp_path: Path, compiler: str, emulator: str, lanes: int) -> None:
    missing = [tool for tool in (compiler.split()[0], emulator.split()[0]) if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    program = tmp_path / "check"
    sources = [str(source) for source in (*SOURCES, CHECK / "check.cpp")]
    build = [*compiler.split(), *FLAGS, "-static", f"-I{CHECK}", *sources, "-o", str(program)]
    subprocess.run(build, check=True, timeout=600)
    done = subprocess.run([*emulator.split(), str(program)], capture_output=True, text=True, timeout=600)
    assert done.stdout == f"every row close and its own, vectors of {lanes} floats\n", done.stdout + done.stderr
    assert done.returncode == 0

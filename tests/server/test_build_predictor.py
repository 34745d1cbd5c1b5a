"""From settings to the predictor, and to whether it learns."""

from pathlib import Path

import numpy as np
import pytest

from verdraft.scheduler.engine import Engine
from verdraft.server.build import build_engine, build_text
from verdraft.server.build_predictor import add_predictor, learners, token_classes
from verdraft.server.settings import Settings, SettingsError
from verdraft.spec.predictor import load_predictor, new_predictor


def build(model: Path, **settings: str) -> tuple[Engine, Settings]:
    chosen = Settings(kv_blocks=32, threads=1, device="cpu", **settings)
    engine = build_engine(chosen, model)
    add_predictor(engine, build_text(model, frozenset()), chosen)
    return engine, chosen


@pytest.fixture(scope="module")
def model(tiny_llama_path: Path, byte_level_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    for file in [*tiny_llama_path.iterdir(), byte_level_folder / "tokenizer.json"]:
        (folder / file.name).symlink_to(file)
    return folder


def test_the_predictor_that_comes_along_is_used_and_learns_in_memory(model: Path) -> None:
    engine, settings = build(model)
    estimates = engine.drafting.estimates
    assert estimates.predictor is not None
    assert np.array_equal(estimates.predictor.layers[0].weight, load_predictor().layers[0].weight)
    assert estimates.classes.any()
    (learner,) = learners(engine, settings)
    assert estimates.teach == learner.add
    assert learner._file is None


def test_without_a_predictor_nothing_learns(model: Path) -> None:
    engine, settings = build(model, predictor="none")
    assert engine.drafting.estimates.predictor is None
    assert learners(engine, settings) == ()


def test_learning_can_be_switched_off(model: Path) -> None:
    engine, settings = build(model, learning="off")
    assert engine.drafting.estimates.predictor is not None
    assert learners(engine, settings) == ()


def test_a_file_is_read_and_goes_on_being_written(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.safetensors"
    engine, settings = build(model, predictor=str(file))
    assert engine.drafting.estimates.predictor is not None
    assert learners(engine, settings)[0]._file == file
    mine = new_predictor(np.random.default_rng(0), hidden=8)
    mine.save(file)
    engine, _ = build(model, predictor=str(file))
    assert engine.drafting.estimates.predictor is not None
    assert engine.drafting.estimates.predictor.layers[0].weight.shape[1] == 8


def test_a_folder_is_no_file(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--predictor: expected auto, none or a file"):
        build(model, predictor=str(tmp_path))


def test_a_file_that_nobody_will_write_must_be_whole(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--predictor: .*none\.safetensors holds no readable predictor"):
        build(model, predictor=str(tmp_path / "none.safetensors"), learning="off")


def test_classes_are_those_of_the_tokenizers_bytes(model: Path) -> None:
    text = build_text(model, frozenset())
    classes = token_classes(text)
    assert len(classes) == text.tokenizer.vocab_size
    assert bool(classes[text.tokenizer.encode("(", False)[0]] & 4)
    assert not classes[text.tokenizer.encode("the", False)[0]]

"""The network on numpy and its file."""

from pathlib import Path

import numpy as np
import pytest

from verdraft.spec.features import FEATURES
from verdraft.spec.predictor import (
    LENGTHS,
    MEAN_UNIT,
    Layer,
    PayoffPredictor,
    PredictorError,
    load_predictor,
    new_predictor,
    path_probs,
    product,
)

FEW = np.random.default_rng(1).normal(size=(5, len(FEATURES))).astype(np.float32)


def make(record: dict[str, str] | None = None) -> PayoffPredictor:
    rng = np.random.default_rng(0)
    fresh = new_predictor(rng, hidden=8)
    shift = rng.normal(size=len(FEATURES)).astype(np.float32)
    return PayoffPredictor(shift, np.abs(shift) + 0.5, fresh.layers, record or {})


def test_it_is_two_hidden_layers_of_relu_with_hazards() -> None:
    predictor = make()
    (w0, b0), (w1, b1), (w2, b2) = predictor.layers
    x = (FEW.astype(np.float64) - predictor.shift) * predictor.scale
    out = np.maximum(np.maximum(x @ w0 + b0, 0) @ w1 + b1, 0) @ w2 + b2
    mean, survival = predictor.predict(FEW)
    assert np.allclose(mean, np.maximum(MEAN_UNIT * out[:, 0], 0), rtol=1e-4, atol=1e-5)
    assert np.allclose(survival, np.cumprod(1 / (1 + np.exp(-out[:, 1:])), axis=1), rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_c_plus_plus_predicts_what_numpy_does(rows: int) -> None:
    """Also of a width that no vector divides, and of what comes with verdraft."""
    features = np.random.default_rng(rows).normal(size=(rows, len(FEATURES))).astype(np.float32)
    for predictor in (make(), load_predictor()):
        assert predictor._native
        mean, survival = predictor.predict(features)
        portable = predictor.predict_portably(features)
        assert np.allclose(mean, portable.mean, rtol=1e-3, atol=1e-4)
        assert np.allclose(survival, portable.survival, rtol=1e-3, atol=1e-5)


def test_survival_never_rises_whatever_the_input() -> None:
    survival = (
        make().predict(100 * np.random.default_rng(2).normal(size=(50, len(FEATURES))).astype(np.float32)).survival
    )
    assert survival.shape == (50, LENGTHS)
    assert (np.diff(survival, axis=1) <= 0).all()
    assert ((survival >= 0) & (survival <= 1)).all()


@pytest.mark.parametrize("shape", [(1, 256, 256), (5, 256, 256), (16, 256, 256), (100, 256, 256), (300, 256, 17)])
def test_products_in_pieces_are_products(shape: tuple[int, int, int]) -> None:
    n, k, m = shape
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(n, k)).astype(np.float32), rng.normal(size=(k, m)).astype(np.float32)
    assert np.allclose(product(a, b), a.astype(np.float64) @ b, atol=1e-3)


def test_an_empty_batch_has_no_predictions() -> None:
    mean, survival = make().predict(FEW[:0])
    assert (mean.shape, survival.shape) == ((0,), (0, LENGTHS))


def test_a_file_brings_the_predictor_back_in_half_precision(tmp_path: Path) -> None:
    made = make({"data": "none"})
    made.save(tmp_path / "new" / "p.safetensors")
    back = load_predictor(tmp_path / "new" / "p.safetensors")
    assert back.record == {"data": "none"}
    assert np.allclose(back.predict(FEW).survival, made.predict(FEW).survival, atol=5e-3)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["p.safetensors"]


@pytest.mark.parametrize("damage", ["missing", "cut", "text", "shape", "nan", "version", "bit"])
def test_a_file_that_is_no_predictor_is_named(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, made = tmp_path / "p.safetensors", make()
    if damage == "version":
        monkeypatch.setattr("verdraft.spec.predictor.FORMAT", 99)
    if damage == "shape":
        first, second, third = made.layers
        made = PayoffPredictor(made.shift, made.scale, (first, second, Layer(third.weight[:, :3], third.bias[:3])))
    if damage == "nan":
        made.layers[0].bias[0] = np.nan
    if damage != "missing":
        made.save(path)
    monkeypatch.undo()
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    if damage == "bit":  # of one number, which stays a finite one
        whole = bytearray(path.read_bytes())
        whole[-1] ^= 1
        path.write_bytes(whole)
    if damage == "text":
        path.write_text("no tensors")
    with pytest.raises(PredictorError, match=r"p\.safetensors"):
        load_predictor(path)


def test_paths_longer_than_the_survival_curve_go_on_as_they_ended() -> None:
    survival = np.float32(0.9) ** np.arange(1, LENGTHS + 1, dtype=np.float32)
    assert path_probs(survival, 3) == pytest.approx((0.9, 0.81, 0.729), rel=1e-5)
    assert path_probs(survival, 20) == pytest.approx([0.9**n for n in range(1, 21)], rel=1e-4)
    assert path_probs(np.zeros(LENGTHS, np.float32), 20)[-1] == 0.0

"""The payoff predictor: from phi to how much of a draft will be accepted (DESIGN section 6; HVD, PAPERS 1.3 and 1.8b).

An MLP of two hidden layers with ReLU, in C++ or, without a compiler, on numpy. Its outputs are the mean accepted length
(the paper's) and the hazards of the first LENGTHS tokens: P(token l is right | all before it are), whose products are
the survival P(accepted >= l).
"""

import ctypes
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from verdraft.kernels.chooser import choose_draft_calls
from verdraft.kernels.native import DraftCalls
from verdraft.spec.features import FEATURES, Floats

FORMAT = 2
LENGTHS = 16  # survival is predicted for 1 .. LENGTHS tokens
HIDDEN = 256
MEAN_UNIT = 8.0  # tokens: the mean leaves the network in this unit, so that both losses are of one size
_ALONE, _ROWS = 1 << 18, 16  # multiplications that OpenBLAS does on one thread
_VECTOR = 16  # floats of the widest vector: what the C++ wants outputs in multiples of
SHIPPED = Path(__file__).parent / "predictor.safetensors"

Tensors = dict[str, NDArray[Any]]


class PredictorError(Exception):
    """A predictor file is missing, damaged or of another version. One sentence that names the file."""


class Payoff(NamedTuple):
    """What is expected of N drafts."""

    mean: Floats  # [N] accepted tokens
    survival: Floats  # [N, LENGTHS] P(accepted >= l) for l = 1 .. LENGTHS, never rising along l


class Layer(NamedTuple):
    """x @ weight + bias."""

    weight: Floats  # [inputs, outputs]
    bias: Floats  # [outputs]


@dataclass(frozen=True, slots=True)
class PayoffPredictor:
    """Learned functions of phi; immutable, so any thread may use one. `record` tells how it came about."""

    shift: Floats  # [F] mean of each feature in training
    scale: Floats  # [F] 1 / its standard deviation
    layers: tuple[Layer, Layer, Layer]
    record: Mapping[str, Any] = field(default_factory=dict)
    _native: "_Native | None" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        calls = choose_draft_calls()
        object.__setattr__(self, "_native", _Native(calls, self._normalised()) if calls else None)

    def _normalised(self) -> tuple[Layer, ...]:
        """The layers as they are for features that were not normalised."""
        first, *others = self.layers
        weight = first.weight * self.scale[:, None]
        return Layer(weight, first.bias - self.shift @ weight), *others

    def predict(self, features: Floats) -> Payoff:
        """From `features` [N, F], as describe() gives them."""
        return self._native.predict(features) if self._native else self.predict_portably(features)

    def predict_portably(self, features: Floats) -> Payoff:
        """The same on numpy, but for roundings."""
        hidden: Floats = (features - self.shift) * self.scale
        for weight, bias in self.layers[:-1]:
            hidden = product(hidden, weight)
            hidden += bias
            np.maximum(hidden, 0.0, out=hidden)
        out = product(hidden, self.layers[-1].weight) + self.layers[-1].bias
        mean: Floats = np.maximum(out[:, 0] * np.float32(MEAN_UNIT), 0.0)
        survival: Floats = sigmoid(out[:, 1:])
        return Payoff(mean, np.multiply.accumulate(survival, axis=1))

    def with_record(self, record: Mapping[str, Any]) -> "PayoffPredictor":
        """The same functions; `record` must be what JSON can hold."""
        return replace(self, record=record)

    def save(self, path: Path) -> None:
        """One file, whole or not at all; half precision but for the normalisation."""
        tensors: Tensors = {"shift": self.shift, "scale": self.scale}
        for i, layer in enumerate(self.layers):
            tensors |= {f"{i}.weight": _half(layer.weight), f"{i}.bias": _half(layer.bias)}
        about = {"format": str(FORMAT), "features": json.dumps(FEATURES), "record": json.dumps(self.record)}
        about["sha256"] = _digest(tensors, about)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, partial, about)
        partial.replace(path)


class _LayerFields(ctypes.Structure):
    """A layer as kernels/payoff.cpp sees it."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("ins", ctypes.c_int64),
        ("outs", ctypes.c_int64),
    )


class _Native:
    """Layers for the C++, their outputs padded."""

    def __init__(self, calls: DraftCalls, layers: tuple[Layer, ...]) -> None:
        self._run = calls.payoff
        self._arrays = [_padded(layer) for layer in layers]
        fields = [_LayerFields(w.ctypes.data, b.ctypes.data, *w.shape) for w, b in self._arrays]
        self._layers = (_LayerFields * len(fields))(*fields)

    def predict(self, features: Floats) -> Payoff:
        assert features.shape[1:] == (len(FEATURES),)
        features, rows = np.ascontiguousarray(features, np.float32), len(features)
        mean, survival = np.empty(rows, np.float32), np.empty((rows, LENGTHS), np.float32)
        layers, outs = ctypes.addressof(self._layers), (mean.ctypes.data, survival.ctypes.data)
        self._run(layers, len(self._layers), features.ctypes.data, rows, LENGTHS, MEAN_UNIT, *outs)
        return Payoff(mean, survival)


def _padded(layer: Layer) -> Layer:
    """With outputs in multiples of a vector; what is added is zero, and no later layer has a weight for it."""
    more = -len(layer.bias) % _VECTOR
    return Layer(np.pad(layer.weight, ((0, 0), (0, more))), np.pad(layer.bias, (0, more)))


def load_predictor(path: Path = SHIPPED) -> PayoffPredictor:
    """What save() wrote, or the predictor that comes with verdraft. Raises PredictorError."""
    try:
        with safe_open(path, "np") as file:
            about = file.metadata() or {}
            stored: Tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise PredictorError(f"{path} holds no readable predictor: {error}") from error
    if about.get("format") != str(FORMAT) or about.get("features") != json.dumps(FEATURES):
        raise PredictorError(f"{path} was made by another version of verdraft: train it anew")
    if about.pop("sha256", "") != _digest(stored, about):
        raise PredictorError(f"{path} is damaged: its numbers are not those that were saved")
    tensors = {name: tensor.astype(np.float32) for name, tensor in stored.items()}
    try:
        layers = [Layer(tensors[f"{i}.weight"], tensors[f"{i}.bias"]) for i in range(3)]
        found = PayoffPredictor(tensors["shift"], tensors["scale"], (layers[0], layers[1], layers[2]), _record(about))
    except (KeyError, ValueError) as error:
        raise PredictorError(f"{path} holds no whole predictor: {error}") from error
    _check(found, path)
    return found


def new_predictor(rng: np.random.Generator, hidden: int = HIDDEN) -> PayoffPredictor:
    """An untrained one: small random weights (He), no normalisation."""
    sizes = (len(FEATURES), hidden, hidden, 1 + LENGTHS)
    layers = [
        Layer(rng.normal(0.0, (2.0 / n) ** 0.5, (n, m)).astype(np.float32), np.zeros(m, np.float32))
        for n, m in pairwise(sizes)
    ]
    zeros, ones = np.zeros(len(FEATURES), np.float32), np.ones(len(FEATURES), np.float32)
    return PayoffPredictor(zeros, ones, (layers[0], layers[1], layers[2]))


def product(a: Floats, b: Floats) -> Floats:  # [n, k], [k, m] -> [n, m]
    """a @ b on this thread alone, for k and m of a hidden layer at the most.

    OpenBLAS calls other threads in for larger products. They spin, and fight with those of the model: on busy cores
    sixteen rows then take milliseconds. So rows go in groups, and columns in quarters where that is still too much.
    """
    n, (k, m) = len(a), b.shape
    if n * k * m <= _ALONE:
        found: Floats = a @ b
        return found
    groups = np.zeros((-(-n // _ROWS), 1, _ROWS, k), np.float32)
    groups.reshape(-1, k)[:n] = a
    quarters = 4 if _ROWS * k * m > _ALONE else 1
    blocks = groups @ b.reshape(k, quarters, m // quarters).transpose(1, 0, 2)  # [groups, quarters, rows, columns]
    return blocks.transpose(0, 2, 1, 3).reshape(-1, m)[:n]


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)) without overflow."""
    found: Floats = 0.5 * np.tanh(0.5 * x) + np.float32(0.5)
    return found


def path_probs(survival: Floats, length: int) -> tuple[float, ...]:  # survival [LENGTHS] of one draft
    """P(accepted >= l) for l = 1 .. length. Behind LENGTHS, tokens are as often right as the last four before."""
    known: list[float] = survival[:length].tolist()
    if length > LENGTHS:
        hazard = (known[-1] / max(known[-5], 1e-9)) ** 0.25
        known += [known[-1] * hazard ** (i + 1) for i in range(length - LENGTHS)]
    return tuple(known)


def _half(values: Floats) -> NDArray[np.float16]:
    return np.clip(values, -65504, 65504).astype(np.float16)


def _digest(tensors: Tensors, about: Mapping[str, str]) -> str:
    """SHA-256 of every name, number and remark of a file."""
    found = hashlib.sha256(json.dumps(sorted(about.items())).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tensor.shape} ".encode() + np.ascontiguousarray(tensor).tobytes())
    return found.hexdigest()


def _record(about: Mapping[str, str]) -> dict[str, Any]:
    record = json.loads(about.get("record", "{}"))
    return record if isinstance(record, dict) else {}


def _check(predictor: PayoffPredictor, path: Path) -> None:
    """Shapes that fit together and finite numbers. Raises PredictorError."""
    width = len(FEATURES)
    fits = predictor.shift.shape == predictor.scale.shape == (width,)
    for weight, bias in predictor.layers:
        fits = fits and weight.ndim == 2 and weight.shape == (width, len(bias))
        width = len(bias)
    arrays = [predictor.shift, predictor.scale, *(array for layer in predictor.layers for array in layer)]
    if not fits or width != 1 + LENGTHS or not all(np.isfinite(array).all() for array in arrays):
        raise PredictorError(f"{path} holds a predictor of the wrong shape, or numbers that are not finite")

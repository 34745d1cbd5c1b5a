"""The forms in which bench/gpu.py measures kernels: every backend that can run, and how it can be asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from verdraft.kernels.base import Kernels
from verdraft.kernels.blocks import GROUP, Quantization
from verdraft.kernels.chooser import BACKENDS, Wish, choose_kernels, survey
from verdraft.model.recordings import CudaRecorder, Recorder

WISHES: Final[tuple[tuple[Quantization, bool], ...]] = (
    ("none", False),
    ("none", True),
    ("int8", False),
    ("fp8", False),
)


@dataclass(frozen=True, slots=True)
class Form:
    """A backend and what is asked of it."""

    backend: str
    quantization: Quantization = "none"
    deterministic: bool = False

    def kernels(self, device: torch.device, dtype: torch.dtype) -> Kernels:
        """Raises KernelUnavailable."""
        return choose_kernels(self.backend, device, dtype, self.quantization, self.deterministic)

    def name(self, kernels: Kernels) -> str:
        """After the library that computes."""
        return kernels.name + self._asked

    def weight_bytes(self, dtype: torch.dtype) -> float:
        """Of one weight; in blocks with its share of a scale."""
        match self.quantization:
            case "int8":
                return 1 + 2 / GROUP
            case "fp8":
                return 1
        return dtype.itemsize

    def __str__(self) -> str:
        return self.backend + self._asked

    @property
    def _asked(self) -> str:
        return (
            f"{' exact' if self.deterministic else ''}{'' if self.quantization == 'none' else f' {self.quantization}'}"
        )


def forms(device: torch.device, dtype: torch.dtype) -> list[Form]:
    """All that can run there, the quickest first, those that are exact after the others; of those with small weights,
    whose products are the same, the quickest alone."""
    found = []
    for quantization, deterministic in WISHES:
        reasons = survey(Wish(device, dtype, quantization, deterministic))
        able = [Form(name, quantization, deterministic) for name in BACKENDS if reasons[name] is None]
        found += able if quantization == "none" else able[:1]
    return found


class Rerunner:
    """In place of recordings where there are none: every replay is the pass again."""

    full = False

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return work


def recorder(device: torch.device) -> Recorder:
    """What records passes there."""
    return CudaRecorder() if device.type == "cuda" else Rerunner()


def can_record(kernels: Kernels, device: torch.device) -> bool:
    """Whether passes of these kernels can be recorded there; on a CPU, as a rehearsal."""
    return kernels.graphs or device.type == "cpu"

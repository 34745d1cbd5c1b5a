"""Times calls on a device, each beside its floor: the larger of bytes over the measured read speed and multiplications
over the measured product speed."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MIDDLE = 5  # rounds, of which the median counts


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement; no floor where none is known. `short`: it belongs into the short table."""

    part: str
    form: str  # of what computes: a backend and how it was asked for
    case: str  # what is computed: the same words for every form
    us: float
    floor_us: float | None = None
    short: bool = False
    detail: str = ""

    def __str__(self) -> str:
        floor = "" if self.floor_us is None else f"{self.floor_us:10.1f} {self.us / max(self.floor_us, 1e-9):8.2f}"
        return f"{self.part:10} {self.form:22} {self.case:48} {self.us:10.1f} {floor:19} {self.detail}".rstrip()


@dataclass(frozen=True, slots=True)
class Speeds:
    """What floors are made of, as measured."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(slots=True)
class Meter:
    """`probe`: side of the matrices that measure the machine; `budget`: seconds for one measurement, 0: one call."""

    device: torch.device
    dtype: torch.dtype
    probe: int
    budget: float
    speeds: Speeds | None = None

    def line(
        self,
        part: str,
        form: str,
        case: str,
        call: Callable[[], object],
        num_bytes: float,
        flops: float = 0.0,
        short: bool = False,
    ) -> Line:
        """One call's, by its least work: bytes to read and operations of products."""
        return Line(part, form, case, 1e6 * self.seconds(call), self.floor_us(num_bytes, flops), short)

    def floor_us(self, num_bytes: float, flops: float) -> float | None:
        """No call can be quicker; None before the machine was measured."""
        if self.speeds is None:
            return None
        return 1e6 * max(num_bytes / self.speeds.bytes_per_s, flops / self.speeds.flops_per_s)

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one call among many that follow each other without a wait; the first is not counted."""
        call()
        once = self._round(call, 1)
        if not self.budget:
            return once
        calls = max(1, min(100, int(self.budget / MIDDLE / once)))
        return sorted(self._round(call, calls) for _ in range(MIDDLE))[MIDDLE // 2]

    def wait(self) -> None:
        """Until the device has nothing more to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def randn(self, *shape: int) -> Tensor:
        """Random numbers of the meter's type, where it measures."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def _round(self, call: Callable[[], object], calls: int) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self.wait()
        return (time.perf_counter() - start) / calls

"""Times calls on a device, each beside its floor: the larger of bytes over the measured read speed and multiplications
over the measured product speed."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

MIDDLE = 5  # rounds, of which the median counts


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement; no floor where none is known."""

    part: str
    what: str
    us: float
    floor_us: float | None = None

    def __str__(self) -> str:
        floor = "" if self.floor_us is None else f"{self.floor_us:10.1f} {self.us / max(self.floor_us, 1e-9):8.2f}"
        return f"{self.part:10} {self.what:56} {self.us:10.1f} {floor}".rstrip()


@dataclass(slots=True)
class Meter:
    """`probe`: side of the matrices that measure the machine; `budget`: seconds for one measurement, 0: one call."""

    device: torch.device
    dtype: torch.dtype
    probe: int
    budget: float
    notes: list[str] = field(default_factory=list)
    bytes_per_s: float = 1.0
    flops_per_s: float = 1.0

    def measure_machine(self) -> None:
        """What floors are made of."""
        data = torch.zeros(self.probe, self.probe, 2, dtype=torch.float32, device=self.device)
        square = torch.zeros(self.probe, self.probe, dtype=self.dtype, device=self.device)
        self.bytes_per_s = 4 * data.numel() / self.seconds(data.sum)
        self.flops_per_s = 2 * self.probe**3 / self.seconds(lambda: square @ square)
        speed = f"{self.bytes_per_s / 1e9:.0f} GB/s, multiplies {self.flops_per_s / 1e12:.1f} TFLOP/s in {self.dtype}"
        self.note(f"reads {speed}")

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"# {text}", flush=True)

    def line(self, part: str, what: str, call: Callable[[], object], num_bytes: float, flops: float = 0.0) -> Line:
        floor = max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)
        return Line(part, what, 1e6 * self.seconds(call), 1e6 * floor)

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one call among many that follow each other without a wait; the first is not counted."""
        call()
        once = self._round(call, 1)
        if not self.budget:
            return once
        calls = max(1, min(100, int(self.budget / MIDDLE / once)))
        return sorted(self._round(call, calls) for _ in range(MIDDLE))[MIDDLE // 2]

    def _round(self, call: Callable[[], object], calls: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self._wait()
        return (time.perf_counter() - start) / calls

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

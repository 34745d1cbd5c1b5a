"""Whether /health tells the truth while the engine is frozen on purpose and while it is not."""

import asyncio
import time
from dataclasses import dataclass, field

import httpx

from verdraft.bench.client import CHAT, events

STUCK_SECONDS = 10.0  # of the HTTP contract: /health must say 503 after these
MARGIN = 2.5  # seconds around a change in which either answer may be true: a step of others may come first
CLOSING_SECONDS = 5.0  # a server that stops ends its engine first
FREEZE_SECONDS = 18.0
INTERVAL = 0.25


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of /health. Times in time.monotonic() seconds; `code` is "" for 200 and "gone" without an answer."""

    asked: float
    answered: float
    code: str


@dataclass(slots=True)
class HealthWatch:
    """Asks all the time. `spans` are (start, end) in which the engine was frozen."""

    client: httpx.AsyncClient
    samples: list[Sample] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            asked = time.monotonic()
            try:
                response = await self.client.get("/health", timeout=10)
                code = "" if response.status_code == 200 else str(response.json()["error"]["code"])
            except httpx.HTTPError:
                code = "gone"
            self.samples.append(Sample(asked, time.monotonic(), code))
            await asyncio.sleep(INTERVAL)

    def slowest(self) -> float:
        """Seconds of the slowest answer."""
        return max((s.answered - s.asked for s in self.samples if s.code != "gone"), default=0.0)

    def lies(self) -> list[str]:
        """Answers that were not true, and freezes that nobody was told of. A missing answer is judged elsewhere."""
        found = [f"said {s.code or 'ok'} {self._when(s)}" for s in self.samples if not self._true(s)]
        told = [s.asked for s in self.samples if s.code == "engine_stuck"]
        silent = [start for start, end in self.spans if not any(start <= at <= end + MARGIN for at in told)]
        return found + ["a freeze was never told of"] * len(silent)

    def _true(self, sample: Sample) -> bool:
        if sample.code in ("gone", "loading"):
            return True
        if sample.code == "engine_dead":
            return any(s.code == "gone" and 0 <= s.asked - sample.asked < CLOSING_SECONDS for s in self.samples)
        if any(self._inside(sample, span) for span in self.spans):
            return sample.code == "engine_stuck"
        return sample.code == "" or any(self._touches(sample, span) for span in self.spans)

    def _inside(self, sample: Sample, span: tuple[float, float]) -> bool:
        """Wholly within the time in which a freeze must be told of."""
        return span[0] + STUCK_SECONDS + MARGIN < sample.asked and sample.answered < span[1] - MARGIN

    def _touches(self, sample: Sample, span: tuple[float, float]) -> bool:
        """Partly within the time in which it may be."""
        return span[0] + STUCK_SECONDS - MARGIN < sample.answered and sample.asked < span[1] + MARGIN

    def _when(self, sample: Sample) -> str:
        start = min((start for start, _ in self.spans), key=lambda at: abs(at - sample.asked), default=0.0)
        return f"{sample.asked - start:.1f} s after the nearest freeze began"


async def freeze(client: httpx.AsyncClient, watch: HealthWatch) -> str:
    """Stop the engine for FREEZE_SECONDS inside the step after a request's first token, and note when."""
    fault = {"kind": "freeze", "after_tokens": 1, "seconds": FREEZE_SECONDS}
    body = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 3, "stream": True, "ignore_eos": True}
    start = 0.0
    async with client.stream("POST", CHAT, json={**body, "speculation": "off", "fault": fault}) as response:
        if response.status_code != 200:
            await response.aread()
            return "refused"
        async for chunk in events(response):
            if not start and any(choice["delta"].get("content") is not None for choice in chunk["choices"]):
                start = time.monotonic()
                watch.spans.append((start, start + FREEZE_SECONDS))
    return "freeze"

"""Traces, as the rest of the server sees them: a span is begun for every request and finished with what came of it.

OpenTelemetry itself is in tracing_otel.py, which is imported only when the environment names a collector.
"""

import logging
from collections.abc import Mapping
from typing import Protocol

from starlette.datastructures import Headers

from verdraft.server.outcome import Outcome

logger = logging.getLogger("verdraft.server")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Span(Protocol):
    """One request's."""

    def finish(self, status: int | None, outcome: Outcome | None) -> None:
        """`status` is None when nothing was answered, `outcome` when nothing was generated."""
        ...


class Tracer(Protocol):
    """Makes spans. Neither begin() nor finish() may wait for anything."""

    def begin(self, method: str, path: str, headers: Headers, request_id: str) -> Span: ...

    def close(self) -> None:
        """Send what is left, for a short time."""
        ...


class NoSpan:
    """Nobody looks."""

    def finish(self, status: int | None, outcome: Outcome | None) -> None:
        return None


class NoTracer:
    """Tracing is off."""

    def begin(self, method: str, path: str, headers: Headers, request_id: str) -> NoSpan:
        return NoSpan()

    def close(self) -> None:
        return None


def make_tracer(environment: Mapping[str, str]) -> Tracer:
    """By the standard OTEL_ variables. What they ask for and cannot be had is said once, in the log."""
    if not _wanted(environment):
        return NoTracer()
    protocol = next((environment[name] for name in PROTOCOLS if environment.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        logger.warning("no traces: OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf, got %r", protocol)
        return NoTracer()
    try:
        from verdraft.server.tracing_otel import OtelTracer
    except ImportError as error:
        logger.warning("no traces: a collector is configured, but verdraft[otel] is not installed (%s)", error)
        return NoTracer()
    return OtelTracer.exporting()


def _wanted(environment: Mapping[str, str]) -> bool:
    disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporter = environment.get("OTEL_TRACES_EXPORTER") or "otlp"
    return not disabled and exporter == "otlp" and any(environment.get(name) for name in ENDPOINTS)

"""Traces through OpenTelemetry: a span for each request, and for each of its choices one for queue, prefill and decode.

Names follow OpenTelemetry's conventions for HTTP and generative models; what speculation did is under `verdraft.`.
"""

import threading
import time
from collections.abc import Iterator
from typing import Self

from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers

import verdraft
from verdraft.scheduler.outputs import Summary, Timing
from verdraft.server.outcome import Outcome
from verdraft.server.report import acceptance

CLOSE_SECONDS = 2.0  # for the last spans; a collector that does not answer must not hold up the end

Attributes = dict[str, AttributeValue]


class OtelTracer:
    """Spans go to `provider`, which no other code shares."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("verdraft", verdraft.__version__)

    @classmethod
    def exporting(cls) -> Self:
        """To the collector that the OTEL_ variables name, in batches from a thread; what it cannot take is dropped."""
        resource = Resource.create()
        if resource.attributes.get(SERVICE_NAME, "").__str__().startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "verdraft"}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def begin(self, method: str, path: str, headers: Headers, request_id: str) -> "OtelSpan":
        attributes: Attributes = {
            "http.request.method": method,
            "url.path": path[:80],
            "verdraft.request_id": request_id,
        }
        parent = propagate.extract(dict(headers))
        span = self._tracer.start_span(f"{method} request", parent, SpanKind.SERVER, attributes)
        return OtelSpan(self, span, method, path)

    def child(self, parent: Span, name: str, start: float, end: float, attributes: Attributes) -> None:
        """A span that is already over; `start` and `end` in time.monotonic() seconds."""
        context = set_span_in_context(parent)
        child = self._tracer.start_span(name, context, attributes=attributes, start_time=_wall(start))
        child.end(_wall(end))

    def close(self) -> None:
        """Waits for CLOSE_SECONDS at most."""
        last = threading.Thread(target=self._provider.shutdown, name="verdraft-traces", daemon=True)
        last.start()
        last.join(CLOSE_SECONDS)


class OtelSpan:
    """A request's span; finish() adds its children."""

    def __init__(self, tracer: OtelTracer, span: Span, method: str, path: str) -> None:
        self._tracer = tracer
        self._span = span
        self._name = f"{method} {path}"

    def finish(self, status: int | None, outcome: Outcome | None) -> None:
        span = self._span
        if status is not None:
            span.set_attribute("http.response.status_code", status)
        failed = status is not None and status >= 500
        if outcome is not None:
            span.update_name(self._name)  # only now is the path known to be one of ours
            span.set_attributes(_of_request(outcome))
            failed = failed or outcome.reason == "error"
            if span.is_recording():
                self._add_choices(outcome)
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def _add_choices(self, outcome: Outcome) -> None:
        for index, summary in enumerate(outcome.report.summaries):
            for name, start, end in _phases(summary.timing):
                attributes: Attributes = {"verdraft.choice": index}
                if name == "decode":
                    attributes |= _of_choice(summary)
                self._tracer.child(self._span, name, start, end, attributes)


def _of_request(outcome: Outcome) -> Attributes:
    report = outcome.report
    attributes: Attributes = {
        "gen_ai.request.model": outcome.model,
        "gen_ai.response.id": outcome.response_id,
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": report.completion_tokens,
        "verdraft.cached_tokens": report.cached_tokens,
        "verdraft.speculation.mode": report.mode,
    }
    if outcome.reason is not None:
        attributes["gen_ai.response.finish_reasons"] = [outcome.reason]
    return attributes | _flat(acceptance(report.num_steps, report.sources))


def _of_choice(summary: Summary) -> Attributes:
    tokens: Attributes = {"gen_ai.usage.output_tokens": summary.num_output_tokens}
    return tokens | _flat(acceptance(summary.spec.num_steps, summary.spec.sources))


def _flat(numbers: dict[str, AttributeValue | dict[str, dict[str, int]]]) -> Attributes:
    """verdraft.speculation.num_draft_tokens, verdraft.speculation.suffix.num_draft_tokens, ..."""
    flat: Attributes = {}
    for name, value in numbers.items():
        if isinstance(value, dict):
            flat |= {f"verdraft.speculation.{s}.{key}": n for s, each in value.items() for key, n in each.items()}
        else:
            flat[f"verdraft.speculation.{name}"] = value
    return flat


def _phases(timing: Timing) -> Iterator[tuple[str, float, float]]:
    """Those that were reached; each ends where the next begins."""
    end = timing.finished
    if end is None:
        return
    yield "queue", timing.arrived, end if timing.scheduled is None else timing.scheduled
    if timing.scheduled is not None:
        yield "prefill", timing.scheduled, end if timing.first_token is None else timing.first_token
    if timing.first_token is not None:
        yield "decode", timing.first_token, end


def _wall(moment: float) -> int:
    """Nanoseconds since 1970."""
    return time.time_ns() - int((time.monotonic() - moment) * 1e9)

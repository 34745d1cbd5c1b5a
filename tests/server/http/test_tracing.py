"""Traces: what a request's spans hold, whose trace they belong to, and that a collector can delay nothing."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from verdraft.server.tracing import NoTracer, make_tracer
from verdraft.server.tracing_otel import OtelTracer

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-request-id": "label-1"}


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(spans: InMemorySpanExporter) -> OtelTracer:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return OtelTracer(provider)


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


async def test_a_request_and_its_phases(stage: Any, tracer: OtelTracer, spans: InMemorySpanExporter) -> None:
    async with stage(tracer=tracer) as s:
        body = {"prompt": "secret words", "n": 2, "max_tokens": 9}
        answer = (await s.client.post("/v1/completions", json=body, headers=TRACEPARENT)).json()
        await s.client.get("/health")
    (whole,) = named(spans, "POST /v1/completions")
    attributes = dict(whole.attributes or {})
    assert len(spans.get_finished_spans()) == 7
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert attributes["gen_ai.response.id"] == answer["id"]
    assert attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert attributes["http.response.status_code"] == 200
    assert attributes["verdraft.request_id"] == "label-1"
    assert attributes["verdraft.speculation.num_accepted_draft_tokens"] == 14
    for name in ("queue", "prefill", "decode"):
        phases = named(spans, name)
        assert [dict(phase.attributes or {})["verdraft.choice"] for phase in phases] == [0, 1]
        assert all(phase.parent and phase.parent.span_id == whole.context.span_id for phase in phases)
        assert all(phase.end_time - phase.start_time == pytest.approx(1e9, rel=0.01) for phase in phases)  # type: ignore[operator]
    decode = dict(named(spans, "decode")[0].attributes or {})
    assert decode["verdraft.speculation.suffix.num_accepted_draft_tokens"] == 3
    assert decode["verdraft.speculation.mean_acceptance_length"] == 4.5
    assert "secret" not in str([span.to_json() for span in spans.get_finished_spans()])


async def test_refusals_and_failures(stage: Any, tracer: OtelTracer, spans: InMemorySpanExporter) -> None:
    async with stage(tracer=tracer) as s:
        await s.client.post("/v1/completions", json={"prompt": ""})
        s.engine.refusal = RuntimeError("no")
        await s.client.post("/v1/completions", json={"prompt": "x"}, headers={"traceparent": "nonsense"})
        await s.client.get("/" + "x" * 500)
    found = [(dict(span.attributes or {})["http.response.status_code"], span.status.status_code) for span in
             spans.get_finished_spans()]  # fmt: skip
    assert found == [(400, StatusCode.UNSET), (500, StatusCode.ERROR), (404, StatusCode.UNSET)]
    assert {span.name for span in spans.get_finished_spans()} == {"POST request", "GET request"}


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP; `delay` in seconds before it answers."""

    def __init__(self, delay: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.delay = delay
        self.names: list[str] = []
        self.services: set[str] = set()
        self.done = threading.Event()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        collector: Any = self.server
        sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        collector.done.wait(collector.delay)
        for part in sent.resource_spans:
            collector.services |= {a.value.string_value for a in part.resource.attributes if a.key == "service.name"}
            collector.names += [span.name for scope in part.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        return None


@pytest.fixture(params=[0.0, 20.0], ids=["quick", "slow"])
def collector(request: pytest.FixtureRequest) -> Iterator[Collector]:
    with Collector(request.param) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.done.set()
        server.shutdown()
        thread.join()


async def test_export_delays_nothing(stage: Any, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    tracer = make_tracer(environment)
    assert isinstance(tracer, OtelTracer)
    async with stage(tracer=tracer) as s:
        started = time.monotonic()
        for _ in range(5):
            await s.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 9})
        assert time.monotonic() - started < 5
    started = time.monotonic()
    tracer.close()
    assert time.monotonic() - started < 5
    if not collector.delay:
        assert collector.names.count("POST /v1/completions") == collector.names.count("decode") == 5
        assert collector.services == {"verdraft"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http/protobuf"),
    ],
)
def test_no_traces(environment: dict[str, str], said: str, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(make_tracer(environment), NoTracer)
    assert (said in caplog.text) if said else not caplog.records


def test_without_a_collector_nothing_is_imported() -> None:
    """And without the extra the server still starts; here the import system hides the SDK."""
    code = """
import sys
from verdraft.server.tracing import NoTracer, make_tracer
import verdraft.server.middleware
assert isinstance(make_tracer({}), NoTracer)
assert not any(name.startswith("opentelemetry") for name in sys.modules)
sys.modules["opentelemetry.sdk"] = None
assert isinstance(make_tracer({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}), NoTracer)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "verdraft[otel] is not installed" in done.stderr

"""Spans over the real protocol to a collector, to none, and not at all."""

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from quire.machine import free_ports
from shared.config import BadConfig, Config, from_sources
from shared.tracing import open_tracer, trace_id, traceparent

ROOT = Path(__file__).resolve().parents[3]


class Collector(http.server.BaseHTTPRequestHandler):
    received: list[ExportTraceServiceRequest]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == "/v1/traces"
        self.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    Collector.received = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", Collector.received
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_collector_gets_spans_of_both_roles_in_one_trace(
    collector: tuple[str, list[ExportTraceServiceRequest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    url, received = collector
    gateway, scheduler = (open_tracer(Config(otlp_endpoint=url), role) for role in ("gateway", "scheduler"))
    assert gateway is not None and scheduler is not None
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    span = gateway.begin("POST /v1/completions", parent, {"http.route": "/v1/completions"})
    below = traceparent(span)
    scheduler.add("queue", below, 1000.0, 1000.5, {"quire.worker": "r"})
    span.end()
    gateway.close()
    scheduler.close()
    found = {}
    for request in received:
        for each in request.resource_spans:
            service = {pair.key: pair.value.string_value for pair in each.resource.attributes}["service.name"]
            for scope in each.scope_spans:
                found.update({(service, sent.name): sent for sent in scope.spans})
    above, inner = found["quire-gateway", "POST /v1/completions"], found["quire-scheduler", "queue"]
    assert above.trace_id == inner.trace_id == bytes.fromhex("ab" * 16)
    assert (above.parent_span_id, inner.parent_span_id) == (bytes.fromhex("cd" * 8), above.span_id)
    assert inner.end_time_unix_nano - inner.start_time_unix_nano == 500_000_000


def test_a_caller_decides_whether_it_is_traced() -> None:
    (port,) = free_ports(1)
    for share, flag, recorded in ((1.0, "00", False), (0.0, "01", True)):
        tracer = open_tracer(Config(otlp_endpoint=f"http://127.0.0.1:{port}", trace_share=share), "gateway")
        assert tracer is not None
        span = tracer.begin("x", f"00-{'ab' * 16}-{'cd' * 8}-{flag}", {})
        assert bool(traceparent(span)) == recorded
        tracer.close()
    none = open_tracer(Config(otlp_endpoint=f"http://127.0.0.1:{port}", trace_share=0.0), "gateway")
    assert none is not None
    for malformed in ("", "00-zz", "ab" * 16):
        assert traceparent(none.begin("x", malformed, {})) == ""  # no word from the caller
    none.close()
    assert trace_id("") == "" and trace_id(f"00-{'ab' * 16}-{'cd' * 8}-01") == "ab" * 16


def test_without_a_collector_nothing_breaks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (port,) = free_ports(1)
    tracer = open_tracer(Config(otlp_endpoint=f"http://127.0.0.1:{port}"), "scheduler")
    assert tracer is not None
    for number in range(5000):  # more than the queue holds
        tracer.add("queue", f"00-{'ab' * 16}-{number + 1:016x}-01", 1.0, 2.0, {})
    tracer.close()
    assert "Traceback" not in caplog.text


def test_off_is_free_and_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_tracer(Config(), "gateway") is None
    code = "import gateway.app, scheduler.service, sys; print([n for n in sys.modules if 'opentelemetry' in n])"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "[]"
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(BadConfig, match=r"otlp_endpoint = 'http://x:4318': needs the packages of quire\[tracing\]"):
        open_tracer(Config(otlp_endpoint="http://x:4318"), "gateway")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("otlp_endpoint", "collector:4318", "must begin with http"), ("trace_share", "1.5", "at least 0 and at most 1")],
)
def test_bad_settings_are_named(name: str, value: str, text: str) -> None:
    with pytest.raises(BadConfig, match=rf"{name} = .*{text}"):
        from_sources({name: value}, {})

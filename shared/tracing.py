"""Spans of one process for an OpenTelemetry collector. Without otlp_endpoint nothing is imported, nothing is done.

Spans leave from a thread of the library's own. When the collector is away they wait in a bounded queue, then are dropped.
"""

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shared.config import BadConfig, Config

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

EXPORT_S = 5.0  # that one batch may take
CLOSE_S = 1.0  # that the last ones may take
HEADER = "traceparent"  # https://www.w3.org/TR/trace-context/
MISSING = "needs the packages of quire[tracing]"


class Tracer:
    """share: of the requests whose caller has not decided already (its traceparent says whether they are traced)."""

    def __init__(self, role: str, exporter: "SpanExporter", share: float) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": f"quire-{role}"})
        self._provider = TracerProvider(ParentBased(TraceIdRatioBased(share)), resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("quire")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, parent: str, attributes: Mapping[str, Any]) -> "Span":
        """A span of a request from outside. parent: the caller's traceparent; empty or malformed: a trace of its own."""
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract({HEADER: parent})
        return self._tracer.start_span(name, context, SpanKind.SERVER, attributes)

    def add(self, name: str, parent: str, begin_s: float, end_s: float, attributes: Mapping[str, Any]) -> None:
        """A span that has ended; times since the epoch."""
        context = self._propagator.extract({HEADER: parent})
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=int(begin_s * 1e9))
        span.end(int(end_s * 1e9))

    def close(self) -> None:
        """Send what waits, unless that takes too long."""
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def traceparent(span: "Span") -> str:
    """What makes others' spans children of this one; empty when it is not recorded."""
    if not span.is_recording():
        return ""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def trace_id(parent: str) -> str:
    return parent.split("-")[1] if parent else ""


def open_tracer(config: Config, role: str) -> Tracer | None:
    """None when nothing is traced; BadConfig when the library is not installed."""
    if not config.otlp_endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise BadConfig(f"otlp_endpoint = {config.otlp_endpoint!r}: {MISSING}") from None
    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # a line per lost batch, none per attempt
    return Tracer(role, OTLPSpanExporter(f"{config.otlp_endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_S), config.trace_share)

"""One line per sequence under the id of its request, and spans of what it went through."""

import logging

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from scheduler.journal import Journal
from shared.messages import Fault
from shared.tracing import Tracer
from tests.unit.scheduler.cells import SmallCell

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


def told(small: SmallCell, caplog: pytest.LogCaptureFixture, tracer: Tracer | None = None) -> list[dict[str, object]]:
    """What the journal logs of all that ended."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "quire.scheduler"):
        Journal(tracer).write(small.cell.ended, small.now)
    assert not small.cell.ended
    return [vars(record) for record in caplog.records if record.message == "ended"]


def test_a_line_says_where_the_time_went(caplog: pytest.LogCaptureFixture) -> None:
    small = SmallCell()
    small.submit(1, [1, 2, 3], 2, request="req-1")
    small.now += 1.0
    small.join()
    small.now += 0.5
    small.answer()
    assert told(small, caplog) == []  # it has not ended
    small.now += 0.25
    small.run()
    (line,) = told(small, caplog)
    assert [line[name] for name in ("id", "reason", "worker", "prompt", "output")] == ["req-1", "length", "r", 3, 2]
    assert [line[name] for name in ("queue_ms", "prefill_ms", "decode_ms", "starts")] == [1000.0, 500.0, 250.0, 1]


def test_what_was_refused_aborted_or_had_no_id(caplog: pytest.LogCaptureFixture) -> None:
    small = SmallCell()
    small.submit(1, [1, 2, 3], request="req-1", deadline_s=1.0)
    small.submit(2, [1, 2, 3], request="req-2")
    small.submit(3, [1, 2, 3])
    small.abort(2, 3)
    small.tick(2.0)
    first, second = told(small, caplog)
    assert (first["id"], first["reason"], second["id"], second["reason"]) == ("req-2", "abort", "req-1", "deadline_exceeded")
    assert second["queue_ms"] == 2000.0 and "prefill_ms" not in second
    small.join()
    with caplog.at_level(logging.INFO, "quire.scheduler"):
        small.submit(4, [1] * 500, request="req-4", max_new=0)
    (refused,) = [vars(record) for record in caplog.records if record.message == "refused"]
    assert (refused["id"], refused["code"]) == ("req-4", "context_length_exceeded")


def test_a_worker_hears_whose_slots_it_opens_and_nothing_later() -> None:
    small = SmallCell()
    small.join()
    small.submit(1, [1, 2, 3], 3, request="req-1")
    small.submit(2, [4, 5], 3)
    opened = []
    while small.plans["w/r/0/1"]:
        opened.append(small.answer().opened)
    assert opened[0] == "req-1" and len(opened) >= 3 and not any(opened[1:])


def test_a_struck_sequence_is_named(caplog: pytest.LogCaptureFixture) -> None:
    small = SmallCell()
    peer = small.join()
    small.submit(1, [1, 2, 3], request="req-1")
    with caplog.at_level(logging.INFO, "quire.scheduler"):
        small.worker(peer, Fault(small.plans[peer][0].step, "boom"))
    (struck,) = [vars(record) for record in caplog.records if record.message == "struck"]
    assert (struck["id"], struck["worker"]) == ("req-1", "r")


def test_spans_are_children_of_the_gateways(caplog: pytest.LogCaptureFixture) -> None:
    small, exporter = SmallCell(), InMemorySpanExporter()
    tracer = Tracer("scheduler", exporter, 0.0)  # the caller has decided already
    small.submit(1, [1, 2, 3], 2, request="req-1", trace=f"00-{TRACE}-{PARENT}-01")
    small.submit(2, [1, 2, 3], 2, request="req-2")  # not traced
    small.now += 1.0
    small.join()
    small.now += 0.5
    small.run()
    told(small, caplog, tracer)
    tracer.close()
    spans: dict[str, ReadableSpan] = {span.name: span for span in exporter.get_finished_spans()}
    assert list(spans) == ["queue", "prefill", "decode"]
    for span in spans.values():
        assert span.parent is not None and span.context is not None
        assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
        assert span.attributes is not None and span.attributes["quire.output"] == 2
    ends = [(span.start_time or 0, span.end_time or 0) for span in spans.values()]
    assert round((ends[0][1] - ends[0][0]) / 1e9, 3) == 1.0 and round((ends[1][1] - ends[1][0]) / 1e9, 3) == 0.5
    assert ends[0][1] == ends[1][0] and ends[1][1] == ends[2][0]

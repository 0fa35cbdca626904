"""One id per request: in the answer, the log, what the scheduler gets, the traces and the metrics."""

import logging
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from shared.messages import Submit
from shared.tracing import Tracer
from tests.integration.gateway_bench import Answer, Bench, running
from tests.integration.stub_scheduler import Play

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}


async def ask(bench: Bench, headers: dict[str, str] | None = None, *, gap_s: float = 0.0, stream: bool = False) -> Answer:
    ids = bench.ids("ok")
    bench.stub.script = lambda submit, sampling: Play(ids, delay_s=gap_s)
    body = {"prompt": "x", "max_tokens": 2, "stream": stream}
    answer = await bench.post("/v1/completions", body, headers=headers or {})
    assert answer.status == 200
    return answer


def last(bench: Bench) -> Submit:
    return bench.stub.submits[-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_id_from_the_answer_to_the_scheduler(bench: Bench, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    with caplog.at_level(logging.INFO, "quire.gateway"):
        answer = await ask(bench, CALLER, stream=stream)
    (line,) = [vars(record) for record in caplog.records if vars(record).get("route") == "/v1/completions"]
    assert answer.headers["X-Request-Id"] == line["id"] == last(bench).request != ""
    assert last(bench).trace == "" and "trace" not in line  # nobody traces here


async def test_a_trace_goes_on_from_the_caller_to_the_scheduler(toy_folder: Path) -> None:
    exporter = InMemorySpanExporter()
    tracer = Tracer("gateway", exporter, 1.0)
    async with running(toy_folder, tracer=tracer) as bench:
        answer = await ask(bench, CALLER)
        first = last(bench).trace
        await ask(bench)
        second = last(bench).trace
        assert (await bench.post("/v1/completions", {"prompt": 7.5})).status == 400
        assert (await bench.client.get("/health")).status == 200
    tracer.close()
    spans = [span for span in exporter.get_finished_spans() if span.attributes and "completions" in str(span.name)]
    known, own, bad = spans[:3]
    for span, below in ((known, first), (own, second)):
        assert span.context is not None and span.attributes is not None
        assert below[:-2] == f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-" and int(below[-2:], 16) & 1
        assert span.attributes["http.response.status_code"] == 200
    assert known.parent is not None and f"{known.parent.span_id:016x}" == PARENT and first[3:35] == TRACE
    assert known.attributes is not None and known.attributes["quire.request"] == answer.headers["X-Request-Id"]
    assert own.parent is None and second[3:35] != TRACE
    assert bad.attributes is not None and bad.attributes["http.response.status_code"] == 400
    assert not any("health" in span.name for span in exporter.get_finished_spans())


async def test_metrics_name_requests_for_who_asks_for_openmetrics(bench: Bench) -> None:
    answer = await ask(bench, gap_s=0.3)
    async with bench.client.get("/metrics", headers=OPENMETRICS) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text; version=1.")
        families = list(openmetrics(await response.text()))  # type: ignore[no-untyped-call]
    named = {
        family.name.removeprefix("quire_gateway_"): sample.exemplar
        for family in families
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert set(named) == {"first_token_seconds", "token_gap_seconds", "request_seconds"}
    for exemplar in named.values():
        assert exemplar.labels == {"request_id": answer.headers["X-Request-Id"]} and exemplar.value > 0.2


async def test_other_scrapers_get_the_same_values_as_plain_text(bench: Bench) -> None:
    await ask(bench)
    async with bench.client.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        text = await response.text()
    assert "request_id" not in text
    (counted,) = [
        sample.value
        for family in plain(text)
        for sample in family.samples
        if sample.name == "quire_gateway_request_seconds_count"
    ]
    assert counted == 1


async def test_short_gaps_name_nobody(bench: Bench) -> None:
    await ask(bench)
    assert bench.session.metrics.token_gap.exemplars == {} != bench.session.metrics.end_to_end.exemplars

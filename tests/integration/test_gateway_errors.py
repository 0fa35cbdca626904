"""Refusals over HTTP: one shape everywhere, the right status, the right numbers, before any stream begins."""

import asyncio
import json
import resource
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.tokenizer import Tokenizer
from shared.messages import Finish, Reject
from tests import gateway_toys
from tests.chaos.cell import until
from tests.integration.gateway_bench import Bench, running
from tests.integration.stub_scheduler import Play

REJECT = Reject(0, 429, "queue_full", "4097 sequences wait, limit 4096", "", 3.4)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def bench(toy_folder: Path) -> AsyncIterator[Bench]:
    async with running(toy_folder, max_body_bytes=2**20) as made:
        yield made


async def raw(bench: Bench, data: bytes, timeout_s: float = 5.0) -> bytes:
    """Bytes over a socket of their own, and all that comes back until the server closes or falls silent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.readuntil(b"}}"), timeout_s)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("POST", "/v1/nope", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
async def test_s14_one_error_shape_on_all_routes(bench: Bench, method: str, path: str, status: int, code: str) -> None:
    async with bench.client.request(method, path) as response:
        body = json.loads(await response.text())
        assert (response.status, body["error"]["code"]) == (status, code)
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert response.headers["X-Request-Id"]
        if status == 405:
            assert response.headers["Allow"]


async def test_s14_other_content_types_are_415(bench: Bench) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = await bench.post(path, b"prompt=x", headers={"Content-Type": "application/x-www-form-urlencoded"})
        assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")


async def test_b13_a_body_that_is_too_large_is_413_before_it_is_read(bench: Bench) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 209715200\r\n\r\n"
    started = time.monotonic()
    answer = await raw(bench, head + b'{"prompt":"')
    assert time.monotonic() - started < 0.5
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"body_too_large"' in answer and b"209715200" in answer and b"1048576" in answer


async def test_large_bodies_that_arrive_at_once_hold_no_more_than_their_limit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three may hold the memory of two beyond their first 64 KiB; who sends small bodies is not hurt."""
    monkeypatch.setattr(bench.bodies, "_most_bytes", 2 * 300_000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 800000\r\n\r\n"
    writers: list[asyncio.StreamWriter] = []
    for _ in range(2):
        _, writer = await asyncio.open_connection("127.0.0.1", bench.port)
        writer.write(head + b" " * 350_000)
        writers.append(writer)
    await until(lambda: bench.bodies.held_bytes == 2 * (350_000 - 65_536))
    refused = await bench.post("/v1/completions", b" " * 200_000)
    assert (refused.status, refused.error["code"]) == (503, "too_many_large_bodies")
    assert refused.headers["Retry-After"] == "2" and "600000" in refused.error["message"]
    assert (await bench.complete("small", max_tokens=1)).status == 200
    for writer in writers:
        writer.close()
    await until(lambda: bench.bodies.held_bytes == 0)
    assert (await bench.post("/v1/completions", b" " * 200_000)).status == 400  # it was read: no JSON is in it


async def test_b13_a_chunked_body_is_cut_at_the_limit(bench: Bench) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b"a" * 65536 + b"\r\n"
    answer = await raw(bench, head + chunk * 20)
    assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 5_000_000},
        {"prompt": [999_999_999]},
        {"prompt": [-1]},
        {"logprobs": 10**9},
        {"stop": ["s"] * 100_000},
        {"stop": "s" * 900_000},
        {"stop_token_ids": list(range(100)) * 1000},
        {"max_tokens": 2**63},
        {"prompt": "x" * 1_000_000},
        {"prompt": "e\u0301" * 300_000},
    ],
)
async def test_b13_absurd_requests_are_refused_at_once(bench: Bench, fields: dict[str, Any]) -> None:
    body = json.dumps({"prompt": "x", **fields}).encode()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    answer = await bench.post("/v1/completions", body)
    took = time.monotonic() - started
    assert answer.status in (400, 413), answer.body
    assert took < 0.5  # 0.1 s on an idle machine
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
    assert len(answer.error["message"]) < 500
    assert bench.stub.submits == []


@pytest.mark.parametrize("body", [b'{"prompt":"a\xff","max_tokens":1}', b'{"prompt":"\\ud800"}', b"[" * 10_000, b"\xff\xfe"])
async def test_b29_bad_text_is_refused_without_a_trace(bench: Bench, body: bytes) -> None:
    answer = await bench.post("/v1/completions", body)
    assert answer.status == 400
    if b"prompt" in body:
        assert answer.error["param"] == "prompt"


async def test_b28_prompts_that_encode_to_nothing(tmp_path: Path) -> None:
    folder = gateway_toys.write_model(tmp_path, gateway_toys.byte_level(), template="{# says nothing #}")
    async with running(folder) as bench:
        answer = await bench.chat("hi", max_tokens=1, return_token_ids=True)  # generation from BOS
        assert answer.status == 200
        assert answer.body["prompt_token_ids"] == [bench.id("<s>")]
        prompts: list[Any] = ["", [], [[]], ["", "a"]]
        for prompt in prompts:
            assert (await bench.complete(prompt)).error["code"] == "empty_prompt"
        assert (await bench.complete("  \n ", max_tokens=2)).status == 200
        for content in (None, 5):
            assert (await bench.chat(content)).error["param"] == "messages[0].content"
        assert (await bench.chat("")).status == 200


async def test_s01_working_on_ids_only_is_refused(bench: Bench) -> None:
    answer = await bench.complete(stop=["a"], detokenize=False)
    assert (answer.status, answer.error["param"]) == (400, "detokenize")


@pytest.mark.parametrize("stream", [False, True])
async def test_s10_the_numbers_are_right(bench: Bench, stream: bool) -> None:
    answer = await bench.complete("x" * 8, max_tokens=2045, stream=stream)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 2048 tokens" in answer.error["message"]
    assert "8 + 2045 = 2053 > 2048" in answer.error["message"]
    assert (await bench.complete("x" * 8, max_tokens=2040, stop="o")).status == 200


async def test_s64_caps_are_kept_or_refused_and_absent_ones_fit(bench: Bench) -> None:
    answer = await bench.chat("x" * 1000, max_completion_tokens=2048)
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert (await bench.chat("x" * 1000)).status == 200
    submit = bench.stub.submits[-1]
    assert submit.max_new == 2048 - submit.num_prompt
    assert (await bench.complete("x" * 2040)).status == 200
    assert bench.stub.submits[-1].max_new == 8  # of the 16 that completions have by default


async def test_s11_a_prompt_that_is_too_long_is_refused_with_counts(bench: Bench) -> None:
    for answer in (await bench.complete("x" * 2048), await bench.complete(bench.ids("x" * 2048)), await bench.chat("x" * 3000)):
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert "2048" in answer.error["message"]
    assert bench.stub.submits == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("wrong", [{"n": 0}, {"temperature": -1}, {"tools": [{}]}, {"model": "other"}, {"foo": 1}])
async def test_s13_errors_come_before_stream_headers(bench: Bench, path: str, wrong: dict[str, Any]) -> None:
    body = {"messages": HI} if "chat" in path else {"prompt": "x"}
    if "chat" not in path and "tools" in wrong:
        wrong = {"response_format": {"type": "json_object"}}
    answer = await bench.post(path, {**body, "stream": True, **wrong})
    assert answer.status == (404 if "model" in wrong else 400)
    assert answer.headers["Content-Type"].startswith("application/json")
    assert answer.error["param"] == next(iter(wrong))


@pytest.mark.parametrize("stream", [False, True])
async def test_s13_refusals_of_the_scheduler_have_their_status(bench: Bench, stream: bool) -> None:
    bench.stub.plays = [Play([], reject=REJECT)]
    answer = await bench.complete(stream=stream)
    assert (answer.status, answer.error["code"], answer.error["type"]) == (429, "queue_full", "rate_limit_error")
    assert answer.headers["Retry-After"] == "3"
    assert answer.error["message"] == REJECT.text


async def test_s13_one_refused_choice_ends_the_others(bench: Bench) -> None:
    bench.stub.plays = [Play([bench.id("ABC")] * 99, delay_s=0.01), Play([], reject=REJECT, delay_s=0)]
    assert (await bench.complete(n=2, max_tokens=1000)).status == 429
    await bench.until_idle()
    assert len(bench.stub.aborted) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_s16_n_zero(bench: Bench, stream: bool) -> None:
    answer = await asyncio.wait_for(bench.chat(n=0, stream=stream), 2)
    assert (answer.status, answer.error["param"]) == (400, "n")


async def test_b19_bias_outside_the_vocabulary(bench: Bench) -> None:
    size = bench.session.model.vocab_size
    for bias in ({str(size): 5}, {"-1": 5}, {"abc": 5}, {"5": 1e9}):
        assert (await bench.complete(logit_bias=bias)).status == 400
    assert (await bench.complete(logit_bias={str(size - 1): 5}, max_tokens=1)).status == 200


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e30", "-1", "2.5"])
async def test_b22_raw_numbers(bench: Bench, literal: str) -> None:
    answer = await bench.post("/v1/completions", f'{{"prompt":"x","temperature":{literal}}}'.encode())
    assert answer.status == 400


@pytest.mark.parametrize(
    ("reason", "status", "code"), [(Finish.ERROR, 500, "computation_failed"), (Finish.DEADLINE, 504, "deadline_exceeded")]
)
async def test_failed_computations_are_errors_never_answers(bench: Bench, reason: int, status: int, code: str) -> None:
    bench.stub.script = lambda submit, sampling: Play([bench.id("ABC")], reason=reason, delay_s=0.02)
    answer = await bench.complete(max_tokens=5)
    assert (answer.status, answer.error["code"]) == (status, code)
    streamed = await bench.complete(max_tokens=5, stream=True)
    assert streamed.status == 200
    assert streamed.events[-1]["error"]["code"] == code  # and no [DONE]
    assert streamed.events[0]["choices"][0]["text"] == "ABC"
    bench.stub.script = lambda submit, sampling: Play([], reason=reason)
    streamed = await bench.complete(max_tokens=5, stream=True)
    assert (streamed.status, streamed.error["code"]) == (status, code)


async def test_request_ids(bench: Bench) -> None:
    ids = set()
    for _ in range(2):
        answer = await bench.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": "mine"})
        assert answer.headers["X-Client-Request-Id"] == "mine"
        ids.add(answer.headers["X-Request-Id"])
    assert len(ids) == 2 and "mine" not in ids
    answer = await bench.post("/v1/completions", {"prompt": "x", "stream": True}, headers={"X-Client-Request-Id": "theirs"})
    assert answer.headers["X-Client-Request-Id"] == "theirs"


async def test_models_version_health_metrics(bench: Bench) -> None:
    async with bench.client.get("/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("toy", "model", 2048)
    async with bench.client.get("/v1/models/toy") as response:
        assert await response.json() == model
    async with bench.client.get("/version") as response:
        assert (await response.json())["version"]
    await bench.complete(max_tokens=2)
    await bench.complete(n=0)
    async with bench.client.get("/metrics") as response:
        text = await response.text()
    for line in (
        'quire_gateway_requests_total{route="/v1/completions",status="200"} 1.0',
        'quire_gateway_requests_total{route="/v1/completions",status="400"} 1.0',
        'quire_gateway_finished_total{reason="length"} 1.0',
        "quire_gateway_prompt_tokens_total 1.0",
        "quire_gateway_generated_tokens_total 2.0",
        "quire_gateway_first_token_seconds_count 1.0",
        "quire_gateway_token_gap_seconds_count 1.0",
        "quire_gateway_request_seconds_count 1.0",
        "quire_gateway_running_requests 0.0",
        "quire_gateway_connected 1.0",
    ):
        assert line in text.splitlines(), line


async def test_http_1_0_clients_get_their_stream(bench: Bench) -> None:
    body = b'{"prompt":"x","stream":true,"max_tokens":2}'
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    writer.write(head + body)
    text = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert text.endswith(b"data: [DONE]\n\n")
    assert b"chunked" not in text


async def test_a_deadline_is_told_to_the_scheduler_and_kept_without_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(seconds: str) -> Any:
        return await bench.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Timeout": seconds})

    assert (await ask("30")).status == 200
    assert 29 < bench.stub.submits[-1].deadline_s <= 30
    for wrong in ("0", "-1", "nan", "inf", "soon", "1e9"):
        assert (await ask(wrong)).error["param"] == "X-Request-Timeout"
    monkeypatch.setattr("gateway.run.DEADLINE_GRACE_S", 0.05)
    bench.stub.plays = [Play([1], hold=True)]
    answer = await ask("0.1")
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    await bench.until_idle()


async def test_b13_log_probabilities_of_a_whole_answer_are_bounded(bench: Bench) -> None:
    fields = {"n": 512, "logprobs": 20, "max_tokens": 2000}
    answer = await bench.complete(**fields)
    assert (answer.status, answer.error["param"]) == (400, "logprobs")
    assert bench.stub.submits == []
    assert (await bench.complete(**{**fields, "n": 2})).status == 200


async def test_many_prompts_are_encoded_off_the_loop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, add_special: bool) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(self, text, add_special)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    answer = await bench.complete(["word"] * 500, max_tokens=1)
    assert [choice["index"] for choice in answer.body["choices"]] == list(range(500))
    assert len(threads) == 500
    assert all(name.startswith("encode") for name in threads)

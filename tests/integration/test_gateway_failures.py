"""Clients that leave or do not read, schedulers that die, repeat or lose messages: streams go on, nothing is left behind."""

import asyncio
import json
import socket as socket_module
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway import app
from gateway.errors import Unavailable
from gateway.openai import parse_completion
from shared import columns
from shared.messages import Finish, Status
from tests.integration.gateway_bench import Bench, parse_events, running
from tests.integration.stub_scheduler import READY, Play

LOADING = Status("loading", "no worker has said hello", 0, 0, 0, 0, 0.0)


@pytest.fixture
async def bench(toy_folder: Path) -> AsyncIterator[Bench]:
    async with running(toy_folder, write_buffer_bytes=65536, sse_comment_s=0.2) as made:
        yield made


def count(bench: Bench, length: int, **options: Any) -> str:
    """Every sequence counts up; the text of the whole answer."""
    text = ",".join(map(str, range(length)))
    play = Play(bench.ids(text), **options)
    bench.stub.script = lambda submit, sampling: play
    return text


async def metric(bench: Bench, name: str) -> float:
    async with bench.client.get("/metrics") as response:
        lines = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if not line.startswith("#"))
    return float(lines[name])


async def until(condition: Any, timeout_s: float = 3.0) -> None:
    end = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.01)


class Socket:
    """A client of one request that can do what a library would not."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def post(
        cls, bench: Bench, path: str = "/v1/completions", limit: int = 2**16, receive_bytes: int = 0, **body: Any
    ) -> "Socket":
        raw = socket_module.socket()
        if receive_bytes:
            raw.setsockopt(socket_module.SOL_SOCKET, socket_module.SO_RCVBUF, receive_bytes)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", bench.port))
        reader, writer = await asyncio.open_connection(sock=raw, limit=limit)
        data = json.dumps({"prompt": "x", "max_tokens": 1000, **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        return cls(reader, writer)

    async def read_until(self, text: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(text), 3)

    async def cut(self) -> None:
        self.writer.transport.abort()
        await asyncio.sleep(0)


# --- clients that leave


@pytest.mark.parametrize("stream", [False, True])
async def test_b41_clients_that_leave_in_every_phase(bench: Bench, stream: bool) -> None:
    count(bench, 400, delay_s=0.005)
    holding, sockets = 50, []
    bench.stub.plays = [Play([1], hold=True) for _ in range(holding)]  # queued: nothing is said yet
    for _ in range(holding):
        sockets.append(await Socket.post(bench, stream=stream))
    await until(lambda: len(bench.stub.submits) == holding)
    for _ in range(100):  # running
        sockets.append(await Socket.post(bench, stream=stream))
    await until(lambda: len(bench.stub.submits) == 150)
    if stream:
        await asyncio.gather(*(socket.read_until(b'"text":"1"') for socket in sockets[holding:]))
    for number, socket in enumerate(sockets):
        if number % 3:
            await socket.cut()
        else:  # half closed: nobody reads any more either
            socket.writer.write_eof()
    await bench.until_idle(1.0)
    assert len(bench.stub.aborted) == len(set(bench.stub.aborted)) == 150
    assert await metric(bench, "quire_gateway_aborted_total") == 150
    assert await metric(bench, "quire_gateway_running_requests") == 0
    for socket in sockets:
        socket.writer.close()


async def test_b41_a_client_that_leaves_while_its_prompt_is_encoded(bench: Bench) -> None:
    bench.stub.plays = [Play([1], hold=True) for _ in range(10)]  # nobody is done before its client leaves
    sockets = [await Socket.post(bench, prompt="word " * 2000, truncate_prompt_tokens=5) for _ in range(10)]
    for socket in sockets:
        await socket.cut()
    await bench.until_idle(2.0)
    assert not bench.stub.running
    text = await (await bench.client.get("/metrics")).text()  # one moment: some handlers may be on their way out
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    left = lines.get('quire_gateway_requests_total{route="/v1/completions",status="499"}', "0.0")
    assert lines["quire_gateway_aborted_total"] == left, "those that never ran count too"


async def test_b43_gauges_are_zero_after_a_mass_cancel(bench: Bench) -> None:
    count(bench, 400, delay_s=0.01)
    sockets = [await Socket.post(bench, stream=True, n=4) for _ in range(20)]
    await until(lambda: len(bench.stub.submits) == 80)
    assert await metric(bench, "quire_gateway_live_sequences") == 80
    for socket in sockets:
        await socket.cut()
    await bench.until_idle(1.0)
    for name in ("live_sequences", "running_requests"):
        assert await metric(bench, f"quire_gateway_{name}") == 0


async def test_s58_a_reader_that_does_not_read_is_dropped(bench: Bench) -> None:
    word = bench.id(" Paris")
    endless, short = Play([word] * 200_000, per_message=500, delay_s=0.0001), Play(bench.ids("ok"))
    bench.stub.script = lambda submit, sampling: endless if submit.max_new == 200_000 else short
    bench.stub.say(READY._replace(max_model_len=10**6, pool_tokens=10**6))
    await until(lambda: bench.session.service.max_len == 10**6)
    socket = await Socket.post(bench, stream=True, max_tokens=200_000, limit=1024)
    await until(lambda: bench.session.runs)
    canaries = 0
    while bench.session.runs:
        assert (await asyncio.wait_for(bench.complete(max_tokens=8), 1)).text() == "ok"
        canaries += 1
        assert canaries < 2000
    assert canaries
    assert await metric(bench, "quire_gateway_slow_readers_total") == 1
    await until(lambda: len(bench.stub.aborted) == 1)
    await socket.cut()


async def test_a_reader_of_a_whole_answer_that_does_not_read_is_dropped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "READER_S", 1.0)
    play = Play([bench.id(" Paris")] * 2000, per_message=2000)
    bench.stub.script = lambda submit, sampling: play
    client = await Socket.post(bench, n=100, max_tokens=2000, limit=1024, receive_bytes=4096)  # 1.2 MB
    client.reader._transport.pause_reading()  # type: ignore[attr-defined]
    await until(lambda: bench.session.metrics.finished.total() == 100 and not bench.session.runs, 20)
    await asyncio.sleep(2.0)
    client.reader._transport.resume_reading()  # type: ignore[attr-defined]
    with pytest.raises(ConnectionError):
        while await asyncio.wait_for(client.reader.read(2**20), 3):
            pass
        raise AssertionError("all of it arrived")


async def test_connections_without_a_request_are_closed(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "IDLE_S", 0.5)
    async with running(toy_folder) as bench:
        heads = (b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /he")
        for head in heads:
            reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
            writer.write(head)
            await asyncio.wait_for(reader.read(), 3)  # until it is closed
            writer.close()


async def test_comments_keep_a_quiet_stream_open(bench: Bench) -> None:
    bench.stub.plays = [Play(bench.ids("ok"), delay_s=0.5)]
    socket = await Socket.post(bench, stream=True)
    assert await socket.read_until(b"data: [DONE]\n\n")
    await socket.cut()
    bench.stub.plays = [Play(bench.ids("ok"), delay_s=0.5)]
    async with bench.client.post("/v1/completions", json={"prompt": "x", "stream": True}) as response:
        text = await response.text()
    lines = text.split("\n\n")
    assert lines[0].startswith(":")  # from acceptance on, before any token
    assert text.count(": ") - text.count('": ') >= 4
    assert [event["choices"][0]["text"] for event in parse_events(text)[:-1]] == ["o", "k", ""]


async def test_a_refusal_after_a_comment_is_an_error_event(bench: Bench) -> None:
    bench.stub.plays = [Play([], reason=Finish.ERROR, delay_s=0.4)]
    answer = await bench.complete(stream=True)
    assert answer.status == 200
    assert [event["error"]["code"] for event in answer.events] == ["computation_failed"]


# --- schedulers that fail


async def test_streams_survive_a_scheduler_that_dies(bench: Bench) -> None:
    text = count(bench, 60, delay_s=0.01, cached=1)
    address = bench.session.service._config.gateway_link
    requests = [asyncio.create_task(bench.complete(max_tokens=1000, stream=bool(each % 2), logprobs=0)) for each in range(10)]
    await until(lambda: len(bench.stub.submits) == 10)
    await asyncio.sleep(0.2)
    await bench.stub.die()
    await until(lambda: bench.session.service.welcome is None)
    refused = await bench.complete()
    assert (refused.status, refused.headers["Retry-After"]) == (503, "2")
    count(bench, 60, delay_s=0.01, cached=0)
    await bench.stub.start_again(address)
    answers = await asyncio.gather(*requests)
    for answer in answers:
        if not answer.events:  # what was cached when the request came, not when it was resumed
            assert answer.usage["prompt_tokens_details"] == {"cached_tokens": 1}
        assert answer.status == 200
        assert answer.text() == text
        assert answer.choice()["finish_reason"] == "stop"
    resumed = bench.stub.submits[10:]
    assert len(resumed) == 10
    assert all(len(submit.tokens) // 4 > submit.num_prompt for submit in resumed)
    assert all(submit.age_s > 0.2 for submit in resumed)
    assert bench.session.service.epoch == 2


async def test_a_gateway_that_was_forgotten_says_hello_and_goes_on(bench: Bench) -> None:
    text = count(bench, 60, delay_s=0.01)
    request = asyncio.create_task(bench.complete(max_tokens=1000, stream=True))
    await until(lambda: len(bench.stub.submits) == 1)
    await asyncio.sleep(0.1)
    bench.stub.reset_all()
    assert (await request).text() == text
    assert len(bench.stub.hellos) == 2


async def test_requests_that_wait_survive_and_clients_that_leave_meanwhile_are_forgotten(bench: Bench) -> None:
    bench.stub.plays = [Play([1], hold=True) for _ in range(2)]
    address = bench.session.service._config.gateway_link
    waiting = asyncio.create_task(bench.complete(max_tokens=8))
    leaving = await Socket.post(bench)
    await until(lambda: len(bench.stub.submits) == 2)
    await bench.stub.die()
    await leaving.cut()
    await bench.stub.start_again(address)
    assert (await waiting).text() == "ok"
    assert len(bench.stub.submits) == 3


async def test_messages_that_come_twice_say_nothing_new(bench: Bench) -> None:
    text = count(bench, 30, twice=True)
    whole, _ = await bench.both(max_tokens=1000)
    assert whole.text() == text


@pytest.mark.parametrize("skip", [0, 7])
async def test_a_gap_is_noticed_and_filled(bench: Bench, skip: int) -> None:
    text = count(bench, 30, skip=skip, delay_s=0.002)
    answer = await bench.complete(max_tokens=1000)
    assert answer.text() == text
    assert len(bench.stub.submits) == 2
    assert columns.read_i32(bench.stub.submits[1].tokens).tolist()[1:] == bench.ids(text)[:skip]
    assert len(bench.stub.aborted) == 1


async def test_late_tokens_of_an_earlier_id_find_nobody(bench: Bench) -> None:
    count(bench, 30, delay_s=0.002)
    text = count(bench, 30)
    for stop in ("3", "5"):
        answer = await bench.complete(stop=stop, max_tokens=1000)
        assert answer.text() == text.partition(stop)[0]


async def test_readiness_follows_the_scheduler(bench: Bench) -> None:
    async with bench.client.get("/ready") as response:
        assert (response.status, (await response.json())["status"]) == (200, "ready")
    bench.stub.say(LOADING)
    await until(lambda: bench.session.service.unavailable() is not None)
    for path in ("/ready",):
        async with bench.client.get(path) as response:
            assert response.status == 503
            assert "no worker has said hello" in await response.text()
    async with bench.client.get("/health") as response:
        assert response.status == 200
    answer = await bench.chat()
    assert (answer.status, answer.error["code"]) == (503, "loading")
    assert answer.headers["Retry-After"]
    assert (await bench.chat(n=0)).status == 400  # a wrong request is wrong at any time
    bench.stub.say(READY)
    await until(lambda: bench.session.service.unavailable() is None)
    bench.stub.drain("update")
    await until(lambda: bench.session.service.unavailable() is not None)
    assert "update" in (await bench.chat()).error["message"]
    bench.stub.say(READY)


async def test_a_scheduler_of_another_model_is_told_clearly(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.service.REFUSED_RETRY_S", 0.3)
    async with running(toy_folder) as bench:
        address = bench.session.service._config.gateway_link
        await bench.stub.die()
        bench.stub.fatal = "this cell serves model abc, the gateway has fff"
        await bench.stub.start_again(address)
        await until(lambda: "abc" in str(bench.session.service.unavailable()))
        answer = await bench.complete()
        assert answer.status == 503
        assert bench.stub.fatal in answer.error["message"]
        bench.stub.fatal = ""
        await bench.session.wait_ready(10)  # by itself, when the right one comes


async def test_a_fault_in_one_stream_spares_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.choice import Choice

    text = count(bench, 20, delay_s=0.005)
    true = Choice.on_token

    def faulty(self: Choice, token: int, score: Any, now: float) -> None:
        if len(self.sequence.prompt.ids) == 3 and len(self.sequence.output) == 5:
            raise RuntimeError("a fault")
        true(self, token, score, now)

    monkeypatch.setattr(Choice, "on_token", faulty)
    good, bad = await asyncio.gather(bench.complete(max_tokens=1000), bench.complete("xyz", max_tokens=1000))
    assert good.text() == text
    assert (bad.status, bad.error["code"]) == (500, "internal_error")
    assert "fault" not in bad.error["message"]
    await bench.until_idle()


# --- without HTTP


async def test_the_session_serves_without_http(bench: Bench) -> None:
    text = count(bench, 20)
    session = bench.session
    request = parse_completion({"prompt": "x", "max_tokens": 1000, "n": 2, "stream": True}, session.limits)
    async with session.open(await session.prepare(request)) as run:
        texts = {0: "", 1: ""}
        async for delta in run:
            texts[delta.choice.index] += delta.text
        assert texts == {0: text, 1: text}
    request = parse_completion({"prompt": "x", "max_tokens": 3, "return_token_ids": True}, session.limits)
    async with session.open(await session.prepare(request)) as run:
        await run.wait()
        (choice,) = run.choices
        assert (choice.text, choice.token_ids, choice.finish_reason) == (text[:3], bench.ids(text[:3]), "length")
        assert run.usage.completion_tokens == 3


async def test_leaving_the_block_aborts_exactly_once(bench: Bench) -> None:
    count(bench, 400, delay_s=0.01)
    session = bench.session
    request = parse_completion({"prompt": "x", "max_tokens": 1000, "n": 3}, session.limits)
    with pytest.raises(RuntimeError):
        async with session.open(await session.prepare(request)) as run:
            await run.begun.wait()
            raise RuntimeError
    await bench.until_idle()
    assert sorted(bench.stub.aborted) == sorted(submit.id for submit in bench.stub.submits)
    assert len(bench.stub.aborted) == 3


async def test_a_session_that_drains_takes_nothing_new(bench: Bench) -> None:
    count(bench, 20, delay_s=0.01)
    running_one = asyncio.create_task(bench.complete(max_tokens=1000))
    await until(lambda: bench.session.runs)
    bench.session.draining = "this gateway stops"
    answer = await bench.complete()
    assert (answer.status, answer.error["code"]) == (503, "draining")
    with pytest.raises(Unavailable):
        bench.session.check_available()
    await asyncio.wait_for(bench.session.wait_idle(), 3)
    assert (await running_one).status == 200
    bench.session.draining = ""

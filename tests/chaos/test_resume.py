"""Resumable streams: cut off at any event, by the client or by the death of its gateway, they go on at another gateway."""

import asyncio
import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway import app
from gateway.api_keys import hashed
from tests.chaos.cell import Cell, running, until
from tests.chaos.follower import Follower
from tests.chaos.requests import bodies, essence

NUM_TOKENS = 12
Asked = dict[str, tuple[str, dict[str, Any]]]  # kind -> (path, body)


async def all_kinds(cell: Cell, num_tokens: int = NUM_TOKENS) -> tuple[Asked, dict[str, Any]]:
    """A stream of every kind, and what it is if nothing happens."""
    asked: Asked = {name: ("/v1/completions", body) for name, body in bodies(num_tokens).items()}
    asked["min tokens"][1]["min_tokens"] = 8
    del asked["whole"]
    greedy = asked["greedy"][1]
    chat: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "seed": 3, "return_token_ids": True}
    for number, more in enumerate(({}, {"logprobs": True, "top_logprobs": 1}, {"n": 2})):
        messages = [{"role": "user", "content": f"Question {number}?"}]
        asked[f"chat {number}"] = ("/v1/chat/completions", chat | more | {"messages": messages})
    asked["plain"] = ("/v1/completions", {"prompt": "What?", "max_tokens": num_tokens, "ignore_eos": True, "seed": 4})
    asked["two prompts"] = ("/v1/completions", greedy | {"prompt": ["Who?", "Where?"], "n": 2})
    asked["echo"] = ("/v1/completions", greedy | {"prompt": "Echo this", "echo": True})
    asked["scored echo"] = ("/v1/completions", greedy | {"prompt": "Echo this too", "echo": True, "logprobs": 1})
    expected = dict(zip(asked, await asyncio.gather(*(undisturbed(cell, *each) for each in asked.values())), strict=True))
    for name in ("greedy", "logprobs"):
        text = expected[name]["choices"][0]["text"]
        path, body = asked[name]
        asked[f"{name}, stop"] = (path, body | {"stop": [text[5:9]]})
        expected[f"{name}, stop"] = await undisturbed(cell, *asked[f"{name}, stop"])
        assert expected[f"{name}, stop"]["choices"][0]["end"] == "stop"
    return asked, expected


async def undisturbed(cell: Cell, path: str, body: dict[str, Any]) -> dict[str, Any]:
    follower = Follower(cell.client, body, path)
    await follower.begin(cell.url())
    return essence(follower.answer)


async def test_a_client_that_is_cut_off_at_any_event_goes_on_at_another_gateway(toy_folder: Path) -> None:
    async with running(toy_folder, gateways=1) as cell:
        asked, expected = await all_kinds(cell)

        async def cut(kind: str, limit: int) -> None:
            follower = Follower(cell.client, asked[kind][1], asked[kind][0])
            await follower.begin(cell.url(), limit)
            if not follower.done:
                await follower.go_on(cell.url("g0"))
            assert essence(follower.answer) == expected[kind], (kind, limit)

        for kind in asked:
            await asyncio.gather(*(cut(kind, limit) for limit in range(1, 2 * NUM_TOKENS, 2)))
        assert (await cell.metrics())["quire_kept_streams"] > 0


async def test_a_stream_may_change_hands_at_every_event(toy_folder: Path) -> None:
    async with running(toy_folder, gateways=1) as cell:
        asked, expected = await all_kinds(cell)
        for kind in ("seeded", "three", "logprobs", "chat 1"):
            follower = Follower(cell.client, asked[kind][1], asked[kind][0])
            await follower.begin(cell.url(), 1)
            while not follower.done:
                await follower.go_on(cell.url("g0" if follower.num_resumes % 2 else ""), len(follower.events) + 1)
            assert follower.num_resumes > NUM_TOKENS
            assert essence(follower.answer) == expected[kind], kind


async def killed_gateway(folder: Path, positions: tuple[int, ...]) -> None:
    async with running(folder, "--delay-s=0.02", gateways=2) as cell:
        asked, expected = await all_kinds(cell, 60)
        for position in positions:
            followers = {kind: Follower(cell.client, body, path) for kind, (path, body) in asked.items()}
            reading = asyncio.gather(*(each.begin(cell.url("g0")) for each in followers.values()), return_exceptions=True)
            await until(lambda: len(followers["greedy"].events) >= position)  # noqa: B023
            await cell.kill("g0")
            await reading  # whoever had no answer yet has an error, and begins again
            assert not all(each.done for each in followers.values())
            await asyncio.gather(*(each.to_the_end([cell.url("g0"), cell.url("g1")]) for each in followers.values()))
            for kind, follower in followers.items():
                assert essence(follower.answer) == expected[kind], (kind, position)
            cell.start("g0")
            await cell.ready()


async def test_streams_of_a_killed_gateway_go_on_at_another(toy_folder: Path) -> None:
    await killed_gateway(toy_folder, (1, 13))


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_streams_of_a_gateway_killed_at_every_position(toy_folder: Path) -> None:
    await killed_gateway(toy_folder, tuple(range(1, 20)))


async def test_what_is_left_survives_the_scheduler_and_a_frozen_gateway_does_no_harm(toy_folder: Path) -> None:
    async with running(toy_folder, "--delay-s=0.02", gateways=2) as cell:
        asked, expected = await all_kinds(cell, 40)
        followers = {kind: Follower(cell.client, body, path) for kind, (path, body) in asked.items()}
        await asyncio.gather(*(each.begin(cell.url("g0"), 8) for each in followers.values()))
        await cell.restart("scheduler")
        await cell.ready()
        for follower in followers.values():
            if not follower.done:
                await follower.to_the_end([cell.url("g1")], 16)
        frozen = cell.roles["g1"]
        reading = asyncio.gather(*(each.go_on(cell.url("g1")) for each in followers.values() if not each.done))
        await until(lambda: all(each.done or len(each.events) > 20 for each in followers.values()))
        frozen.signal(signal.SIGSTOP)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        resuming = asyncio.gather(*(each.to_the_end([cell.url()]) for each in followers.values()))
        await asyncio.sleep(0.2)
        frozen.signal(signal.SIGCONT)
        await resuming
        for kind, follower in followers.items():
            assert essence(follower.answer) == expected[kind], kind


async def test_streams_survive_their_gateway_and_the_scheduler_killed_together(toy_folder: Path) -> None:
    async with running(toy_folder, "--delay-s=0.02", gateways=2) as cell:
        asked, expected = await all_kinds(cell, 60)
        followers = {kind: Follower(cell.client, body, path) for kind, (path, body) in asked.items()}
        reading = asyncio.gather(*(each.begin(cell.url("g0")) for each in followers.values()), return_exceptions=True)
        await until(lambda: all(len(each.events) > 12 or each.done for each in followers.values()), 60)
        await asyncio.gather(cell.kill("g0"), cell.kill("scheduler"))
        await reading
        assert not followers["greedy"].done and not followers["three"].done, "those with a stop string may have ended"
        cell.start("scheduler")
        await cell.ready()
        await asyncio.gather(*(each.to_the_end([cell.url("g1"), cell.url()]) for each in followers.values()))
        for kind, follower in followers.items():
            assert essence(follower.answer) == expected[kind], kind


async def test_whoever_comes_takes_it_over(toy_folder: Path) -> None:
    async with running(toy_folder, "--delay-s=0.02", gateways=1) as cell:
        first = Follower(cell.client, {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "seed": 1})
        reading = asyncio.create_task(first.begin(cell.url()))
        await until(lambda: len(first.events) > 5)
        second = Follower(cell.client, {})
        second.stream = first.stream
        await second.go_on(cell.url("g0"))
        await reading
        assert [choice["finish_reason"] for event in first.events[-3:-1] for choice in event["choices"]] == ["abort"]
        assert second.answer.usage["completion_tokens"] == 100
        assert second.answer.text().startswith(first.answer.text())
        third = Follower(cell.client, {})
        third.stream, third.last_id = first.stream, first.last_id
        await third.go_on(cell.url())
        before = "".join(choice["text"] for event in first.events[:-1] for choice in event["choices"])
        assert before + third.answer.text() == second.answer.text(), "that end was none of its events"
        found = await cell.check_clean()
        assert found["quire_prompt_tokens_total"] == 1, "billed once"
        assert found["quire_generated_tokens_total"] == 100


async def test_a_long_stream_is_told_again_no_faster_than_it_is_read(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first event on: far more than a reader may be behind while tokens come."""

    def little_room(request: web.Request) -> None:
        assert request.transport is not None
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)

    async with running(toy_folder, "--delay-s=0.001", write_buffer_bytes=2**16) as cell:
        body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "seed": 1}
        follower = Follower(cell.client, body)
        await follower.begin(cell.url(), 1800)
        monkeypatch.setattr(app, "_cut_off_who_does_not_read", little_room)  # the kernel would take megabytes
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", cell.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
        writer.write(f"GET /v1/streams/{follower.stream} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        await asyncio.sleep(1.0)
        text = (await asyncio.wait_for(reader.read(), 20)).decode()
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert [event["choices"] for event in events[:1800]] == [event["choices"] for event in follower.events]
        assert events[-1]["usage"]["completion_tokens"] == 2000
        writer.close()


async def test_refusals(toy_folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[tenants.{name}]\nkeys = ["{hashed(name)}"]\n' for name in ("ann", "bob")))
    ann, bob = ({"Authorization": f"Bearer {name}"} for name in ("ann", "bob"))
    async with running(toy_folder, resume_grace_s=1.0, api_key_file=str(keys)) as cell:
        async with cell.client.post(
            "/v1/completions", headers=ann, json={"prompt": "x", "max_tokens": 5, "stream": True, "resumable": True, "seed": 1}
        ) as response:
            stream, text = response.headers["X-Stream-Id"], await response.text()
        last = [line[4:] for line in text.splitlines() if line.startswith("id: ")][-1]

        async def get(name: str, **headers: str) -> tuple[int, dict[str, Any]]:
            async with cell.client.get(f"/v1/streams/{name}", headers=headers) as response:
                assert response.status != 200, await response.text()
                return response.status, (await response.json())["error"]

        cell.session.service._welcomed -= 10  # long enough ago for a 404
        async with cell.client.get(f"/v1/streams/{stream}", headers=ann | {"Last-Event-ID": last}) as response:
            assert (response.status, await response.text()) == (200, "data: [DONE]\n\n")
        status, error = await get(stream, **bob)
        assert (status, error["code"], error["param"]) == (404, "stream_not_found", "id")
        assert (await get(stream))[0] == 401
        assert (await get("stream-" + "0" * 32, **ann))[0] == 404
        for wrong in (
            "5",
            f"{stream}:1",
            f"{stream}:1.2-3x",
            f"stream-0:{last.split(':')[1]}",
            f"{stream}:1.1-0",
            f"{stream}:{10**12}-0",
        ):
            status, error = await get(stream, **ann, **{"Last-Event-ID": wrong})
            assert (status, error["param"]) == (400, "Last-Event-ID"), wrong
        async with cell.client.head(f"/v1/streams/{stream}", headers=ann) as response:
            assert response.status == 405
        await asyncio.sleep(1.3)
        status, error = await get(stream, **ann)
        assert status == 404 and "more than 1 s ago" in error["message"]

"""Workers that die, drain or are poisoned beside others, rolling restarts, caches that survive, and the books afterwards."""

import asyncio
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from gateway.app import create_admin_app
from tests.chaos.cell import ROOT, Cell, running, until
from tests.chaos.follower import Follower
from tests.chaos.requests import ask_all, bodies, essence
from tests.integration.gateway_bench import Answer

POISON = 140  # no stub token
MOVE_S = 1.5  # from the notice of a death to the next token, by the promise


def long_bodies(count: int, num_tokens: int) -> dict[str, dict[str, Any]]:
    common = {"max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True}
    return {str(number): common | {"prompt": [20 + number] * 40, "seed": number} for number in range(count)}


async def computing(cell: Cell, count: int) -> None:
    service = cell.session.service
    await until(lambda: service.num_live >= count and cell.fewest_tokens() > 5)


async def test_streams_of_a_dead_worker_continue_on_the_other(toy_folder: Path) -> None:
    async with running(toy_folder, "--delay-s=0.02", workers=2) as cell:
        asked = long_bodies(8, 100)
        expected = await ask_all(cell, asked)
        asking = asyncio.create_task(ask_all(cell, asked))
        await computing(cell, len(asked))
        await cell.kill("r0")
        scheduler = cell.roles["scheduler"]
        await until(lambda: scheduler.seen("replica dropped"))
        lengths = {sequence.id: len(sequence.output) for sequence in cell.session.service._live.values()}
        live = cell.session.service._live
        await until(lambda: all(len(live[each].output) > count for each, count in lengths.items() if each in live))
        paused_s = time.monotonic() - scheduler.seen("replica dropped")
        assert await asking == expected
        print(f"next tokens of all {paused_s:.3f} s after the notice")
        assert paused_s < MOVE_S
        found = await cell.check_clean()
        assert found["quire_failovers_total"] == 1 and found["quire_recomputed_tokens_total"] > 0


async def test_a_poisonous_request_is_refused_after_two_deaths_and_the_others_live(toy_folder: Path) -> None:
    async with running(toy_folder, "--delay-s=0.02", f"--crash-on-token={POISON}") as cell:
        asked = long_bodies(4, 60)
        expected = await ask_all(cell, asked)
        asking = asyncio.create_task(ask_all(cell, asked))
        await computing(cell, len(asked))
        poison = {"prompt": [POISON, 30, 31], "max_tokens": 5}
        refusal = asyncio.create_task(cell.client.post("/v1/completions", json=poison))
        deaths = 0
        while not (refusal.done() and asking.done()):
            if cell.roles["r0"].code is not None:
                deaths += 1
                await cell.restart("r0")
            await asyncio.sleep(0.02)
        async with refusal.result() as response:
            body = await response.json()
            assert response.status == 500, body
        assert deaths == 2
        assert asking.result() == expected


async def test_a_draining_worker_gives_its_sequences_away_at_once(toy_folder: Path) -> None:
    async with running(toy_folder, "--delay-s=0.02", workers=2) as cell:
        asked = bodies(100)
        expected = await ask_all(cell, asked)
        asking = asyncio.create_task(ask_all(cell, asked))
        await computing(cell, len(asked))
        cell.roles["r0"].signal(signal.SIGTERM)
        assert await cell.roles["r0"].ended() == 0
        assert not asking.done(), "it ended before the streams did"
        assert await asking == expected
        assert (await cell.metrics())["quire_generated_tokens_total"] >= 2 * 100 * len(asked)


async def quire(*arguments: str) -> tuple[int | None, str, str]:
    """Exit code and output of a quire command."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "quire.main", *arguments, stdout=pipe, stderr=pipe, cwd=ROOT
    )
    out, error = await child.communicate()
    return child.returncode, out.decode(), error.decode()


async def test_quire_drain_moves_the_sequences_of_a_worker_and_ends_it(toy_folder: Path) -> None:
    async with running(toy_folder, "--delay-s=0.02", workers=2) as cell:
        async with TestServer(create_admin_app(cell.session, cell.config)) as admin:
            number = admin.port
            port = f"--admin-port={number}"
            asked = bodies(100)
            expected = await ask_all(cell, asked)
            asking = asyncio.create_task(ask_all(cell, asked))
            await computing(cell, len(asked))
            code, out, error = await quire("drain", "r0", port)
            assert (code, error) == (0, "") and re.fullmatch(r"r0 leaves; \d+ of its sequences moved\n", out)
            assert await cell.roles["r0"].ended() == 0
            assert not asking.done(), "it ended before the streams did"
            assert await asking == expected
            code, out, error = await quire("drain", "r0", port)
            assert (code, out, error) == (1, "", "quire: error: there is no worker 'r0'; connected: r1\n")
            url = f"http://127.0.0.1:{number}/drain/r1"
            async with cell.client.post(url, headers={"Origin": "http://example.org"}) as response:
                assert response.status == 403
            async with cell.client.get(url) as response:
                assert response.status == 405
        code, out, error = await quire("drain", "r1", port)
        assert code == 1 and f"no gateway answers on 127.0.0.1 port {number}:" in error
        code, out, error = await quire("drain", "r1")
        assert code == 2 and error.startswith("quire: error: admin_port = 0")


async def test_a_rolling_restart_of_every_role_loses_nothing(toy_folder: Path) -> None:
    async with running(toy_folder, "--delay-s=0.02", workers=2, gateways=1) as cell:
        asked = bodies(150)
        expected = await ask_all(cell, asked)
        streams = {name: Follower(cell.client, body, resumable=False) for name, body in asked.items() if body.get("stream")}
        reading = asyncio.gather(*(each.begin(cell.url("g0")) for each in streams.values()))
        asking = asyncio.create_task(ask_all(cell, asked))
        await computing(cell, len(asked))
        gateway = cell.roles["g0"]
        gateway.signal(signal.SIGTERM)
        for name in ("r0", "scheduler", "r1"):
            role = cell.roles[name]
            role.signal(signal.SIGTERM)
            assert await role.ended() == 0
            await cell.restart(name)
            await until(lambda: cell.roles["scheduler"].seen("replica ready"))
        assert not asking.done() and gateway.code is None, "its streams go on"
        assert await asking == expected
        await reading
        assert {name: essence(each.answer) for name, each in streams.items()} == {name: expected[name] for name in streams}
        assert await gateway.ended() == 0
        await cell.restart("g0")
        await cell.ready()


async def test_the_prefix_cache_survives_the_scheduler(toy_folder: Path) -> None:
    async with running(toy_folder) as cell:
        body = {"prompt": [20 + number % 100 for number in range(320)], "max_tokens": 4, "seed": 4}
        cold, warm = await cell.complete(body), await cell.complete(body)
        assert [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in (cold, warm)] == [0, 304]
        await cell.restart("scheduler")
        await until(lambda: cell.roles["scheduler"].seen("replica ready"))
        await cell.ready()
        again = await cell.complete(body)
        assert again.usage["prompt_tokens_details"]["cached_tokens"] == 304
        assert again.text() == cold.text()


async def test_the_books_balance(toy_folder: Path) -> None:
    """B44: some end, some are aborted, all of a dead worker move: each token is counted once."""
    async with running(toy_folder, "--delay-s=0.02", workers=2) as cell:
        asked = long_bodies(6, 50)
        asking = [asyncio.create_task(cell.complete(body)) for body in asked.values()]
        endless = list(long_bodies(10, 3000).values())[6:]
        leaving = [asyncio.create_task(cell.complete(body)) for body in endless]
        await computing(cell, 10)
        await cell.kill("r1")
        answers: list[Answer] = await asyncio.gather(*asking)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        found = await cell.check_clean()
        gateway = cell.session.metrics
        assert [essence(answer)["usage"]["completion_tokens"] for answer in answers] == [50] * 6
        assert found["quire_generated_tokens_total"] == gateway.generated_tokens > 300
        assert found["quire_finished_sequences_total{abort}"] + found["quire_finished_sequences_total{length}"] == 10
        assert found["quire_prompt_tokens_total"] == 10 * 40, "a moved request is billed once"
        assert found["quire_recomputed_tokens_total"] > 0
        assert sum(gateway.finished.values()) + gateway.aborted == 10


async def test_overload_is_told_and_keeps_the_device_full(toy_folder: Path) -> None:
    """Three times what eight rows can do: what is refused says why, the steps stay full, nothing leaks."""
    async with running(toy_folder, "--delay-s=0.02", "--max-num-seqs=8", max_queued_requests=8) as cell:
        statuses: list[int] = []

        async def ask(number: int) -> None:
            body = {"prompt": [20 + number % 100] * 10, "max_tokens": 20, "ignore_eos": True, "seed": number}
            async with cell.client.post("/v1/completions", json=body) as response:
                answer = await response.json()
                statuses.append(response.status)
                if response.status == 429:
                    assert int(response.headers["Retry-After"]) >= 1
                    assert "are waiting, at most 8 may" in answer["error"]["message"]
                else:
                    assert answer["usage"]["completion_tokens"] == 20

        tasks = []
        for number in range(240):
            tasks.append(asyncio.create_task(ask(number)))
            await asyncio.sleep(0.02 * 20 / 8 / 3)
        under_load = await cell.metrics()
        await asyncio.gather(*tasks)
        assert set(statuses) == {200, 429}
        rows = under_load["quire_generated_tokens_total"] / under_load["quire_steps_total"]
        print(f"{statuses.count(200)} answered, {statuses.count(429)} refused, {rows:.2f} of 8 rows busy")
        assert rows > 0.85 * 8


async def test_a_prompt_after_pressure_is_answered_as_before(toy_folder: Path) -> None:
    """B49: the pool overflows again and again, some clients leave: the same prompt has the same answer every time."""
    async with running(toy_folder, "--num-pages=65") as cell:
        body = {"prompt": [20 + number % 90 for number in range(200)], "max_tokens": 40, "seed": 1, "return_token_ids": True}
        expected, cached = essence(await cell.complete(body)), set()
        for turn in range(8):
            others = [
                asyncio.create_task(
                    cell.complete({"prompt": [30 + number, turn + 20] * 100, "max_tokens": 100, "seed": number})
                )
                for number in range(12)
            ]
            again = asyncio.create_task(cell.complete(body))
            await until(lambda: cell.num_tokens() > 60)
            for other in others[turn % 3 :: 3]:
                other.cancel()
            answer = await again
            assert essence(answer) == expected, turn
            cached.add(answer.usage["prompt_tokens_details"]["cached_tokens"])
            await asyncio.gather(*others, return_exceptions=True)
        assert min(cached) < 192, "its pages were never taken by others"


async def test_streams_of_a_frozen_gateway_go_on_when_it_wakes(toy_folder: Path) -> None:
    """It was given up meanwhile, and finds the scheduler restarted the second time. Nobody resumes anything."""
    async with running(toy_folder, "--delay-s=0.02", gateways=1) as cell:
        asked = {name: body for name, body in bodies(100).items() if body.get("stream")}
        expected = await ask_all(cell, asked)
        for restart in (False, True):
            followers = {name: Follower(cell.client, body, resumable=False) for name, body in asked.items()}
            reading = asyncio.gather(*(each.begin(cell.url("g0")) for each in followers.values()))
            await until(lambda: all(len(each.events) > 5 for each in followers.values()))  # noqa: B023
            cell.roles["g0"].signal(signal.SIGSTOP)
            await until(lambda: cell.roles["scheduler"].seen("gateway gone"))
            if restart:
                await cell.restart("scheduler")
            await asyncio.sleep(0.5)
            cell.roles["g0"].signal(signal.SIGCONT)
            await reading
            assert {name: essence(each.answer) for name, each in followers.items()} == expected


@pytest.mark.long
async def test_a_worker_that_is_frozen_again_and_again_costs_nobody_the_answer(toy_folder: Path) -> None:
    async with running(toy_folder, "--delay-s=0.05") as cell:
        asked = long_bodies(6, 120)
        expected = await ask_all(cell, asked)
        asking = asyncio.create_task(ask_all(cell, asked))
        await computing(cell, len(asked))
        worker, scheduler = cell.roles["r0"], cell.roles["scheduler"]
        for number in range(1, 5):
            worker.signal(signal.SIGSTOP)
            await until(lambda: sum("replica dropped" in line for _, line in scheduler.lines) >= number, 30)  # noqa: B023
            seen = cell.fewest_tokens()
            worker.signal(signal.SIGCONT)
            await until(lambda: asking.done() or cell.fewest_tokens() > seen + 3, 60)  # noqa: B023
        assert await asking == expected

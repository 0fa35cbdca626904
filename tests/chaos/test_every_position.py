"""A worker or the scheduler is killed or frozen at every token of an answer: text, ids and usage are as if it had not been."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cell import Cell, running, until
from tests.chaos.requests import NUM_TOKENS, ask_all, bodies, with_stop_string

SOME = (0, 15, 31)
DELAY_S = 0.02

Harm = Callable[[Cell, str], Awaitable[None]]


async def kill(cell: Cell, role: str) -> None:
    await cell.restart(role)


async def freeze(cell: Cell, role: str) -> None:
    """Long enough to be given up; then the zombie wakes, with all it had to say before."""
    frozen = cell.roles[role]
    frozen.signal(signal.SIGSTOP)
    await asyncio.sleep(cell.config.silence_s + 0.5)
    frozen.signal(signal.SIGCONT)


async def disturbed(cell: Cell, asked: dict[str, dict[str, Any]], role: str, harm: Harm, position: int) -> dict[str, Any]:
    """The answers to all requests at once, with harm done when the first of them has so many tokens."""
    service = cell.session.service
    for _ in range(5):  # on a busy machine a step may pass unseen
        await cell.ready()
        asking = asyncio.create_task(ask_all(cell, asked))
        await until(lambda: asking.done() or (service.num_live >= len(asked) and cell.most_tokens() >= position))  # noqa: B023
        if not asking.done():
            await harm(cell, role)
            return await asking
        await asking
    raise AssertionError(f"always over before token {position}")


async def check(folder: Path, role: str, harm: Harm, positions: tuple[int, ...]) -> None:
    async with running(folder, f"--delay-s={DELAY_S}") as cell:
        asked = await with_stop_string(cell, bodies())
        expected = await ask_all(cell, asked)
        assert expected["greedy"]["usage"]["completion_tokens"] == NUM_TOKENS
        assert expected["stop string"]["choices"][0]["end"] == "stop"
        assert 24 < expected["min tokens"]["usage"]["completion_tokens"] < NUM_TOKENS
        for position in positions:
            late = {name: body for name, body in asked.items() if position < 20 or name not in ("stop string", "min tokens")}
            got = await disturbed(cell, late, role, harm, position)
            for name in late:
                assert got[name] == expected[name], (name, position)


@pytest.mark.parametrize("role", ["r0", "scheduler"])
async def test_killed(toy_folder: Path, role: str) -> None:
    await check(toy_folder, role, kill, SOME)


@pytest.mark.parametrize("role", ["r0", "scheduler"])
async def test_frozen(toy_folder: Path, role: str) -> None:
    await check(toy_folder, role, freeze, (7,))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("harm", [kill, freeze])
@pytest.mark.parametrize("role", ["r0", "scheduler"])
async def test_every_position(toy_folder: Path, role: str, harm: Harm) -> None:
    await check(toy_folder, role, harm, tuple(range(NUM_TOKENS)))


@pytest.mark.parametrize("role", ["r0", "scheduler"])
async def test_in_the_middle_of_a_long_prefill(toy_folder: Path, role: str) -> None:
    """A prompt of eight chunks, harmed after some of them; two choices, so that pages are shared."""
    prompt = [20 + number % 200 for number in range(2000)]
    body = {"prompt": prompt, "max_tokens": 8, "n": 2, "seed": 3, "ignore_eos": True, "return_token_ids": True}
    async with running(toy_folder, "--delay-s=0.1") as cell:
        other = body | {"prompt": prompt[::-1]}
        expected = await ask_all(cell, {"long": body})
        for _ in range(2):  # pages may have survived the first time
            asking = asyncio.create_task(ask_all(cell, {"long": body, "other": other}))
            await asyncio.sleep(0.35)
            assert cell.num_tokens() == 0 or cell.session.service.num_live == 4
            await cell.restart(role)
            got = await asking
            assert got["long"] == expected["long"]
            expected = got if "other" not in expected else expected
            assert got["other"] == expected["other"]

"""Minutes of load with a random role killed every few seconds: failed requests, wrong answers, and how long streams paused.

    python -m benchmarks.chaos --minutes 10 --every-s 10

Two gateways, a scheduler and two workers as processes over real sockets. The workers are stubs whose tokens are hashes of all
they attend to, so every answer is compared with its undisturbed one. A killed role starts again at once. Half of the clients
ask for resumable streams and go on at the other gateway when theirs dies; of the others the streams of a killed gateway break,
and those only. A pause is the longest time without a token of one stream that was under way when a role died, from the kill on.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests import gateway_toys
from tests.chaos.cell import Cell, running
from tests.chaos.follower import Follower, Refused

NUM_CLIENTS = 24
NUM_BODIES = 40
NUM_PROBES = 20
GATEWAYS = ("g0", "g1")
ROLES = ("r0", "r1", "scheduler", *GATEWAYS)
CLEAN = ("audit_violations", "internal_errors", "placement_false_credit_tokens")


@dataclass
class Tally:
    answered: Counter[str] = field(default_factory=Counter)  # by kind of client
    wrong: int = 0
    resumes: int = 0
    own_sockets: int = 0  # streams that are not resumable and broke with their gateway
    failures: list[str] = field(default_factory=list)
    deaths: Counter[str] = field(default_factory=Counter)  # by role
    last_token: dict[int, float] = field(default_factory=dict)  # of streams under way, by client
    gateways: dict[int, str] = field(default_factory=dict)  # that clients read from
    pauses: dict[str, list[float]] = field(default_factory=dict)  # by who was killed
    victims: tuple[str, ...] = ()
    killed_at: float = 0.0
    waiting: dict[int, float] = field(default_factory=dict)  # client -> longest gap since the kill

    def on_token(self, client: int) -> None:
        now = time.monotonic()
        if client in self.waiting:
            self.waiting[client] = max(self.waiting[client], now - max(self.last_token[client], self.killed_at))
        self.last_token[client] = now

    def on_kill(self, victims: tuple[str, ...]) -> None:
        self.settle()
        self.deaths.update(victims)
        self.victims, self.killed_at = victims, time.monotonic()
        harmed = [each for each in self.last_token if set(victims) - set(GATEWAYS) or self.gateways[each] in victims]
        self.waiting = dict.fromkeys(harmed, 0.0)

    def on_break(self, client: int) -> None:
        """It has no next token to wait for."""
        self.last_token.pop(client, None)
        self.waiting.pop(client, None)

    def on_end(self, client: int) -> None:
        self.last_token.pop(client, None)
        if client in self.waiting:
            self.pauses.setdefault(" + ".join(self.victims), []).append(self.waiting.pop(client))

    def settle(self) -> None:
        """Streams that are still under way have had their pause."""
        if self.victims:
            self.pauses.setdefault(" + ".join(self.victims), []).extend(self.waiting.values())
        self.waiting = {}


class Reader(Follower):
    """A client's stream that tells its tokens to the tally."""

    def __init__(self, cell: Cell, body: dict[str, Any], client: int, tally: Tally) -> None:
        super().__init__(cell.client, body, resumable=client % 2 == 0)
        self.number = client
        self._tally = tally

    def _take(self, event_id: str, data: str) -> None:
        super()._take(event_id, data)
        event = self.events[-1]
        if event != "[DONE]" and "error" not in event and any(choice.get("token_ids") for choice in event["choices"]):
            self._tally.on_token(self.number)

    @property
    def ids(self) -> list[int]:
        """Token ids of the answer; ValueError when it is an error."""
        if any("error" in event for event in self.events[:-1] if event != "[DONE]") or self.events[-1] != "[DONE]":
            raise ValueError(str(self.events[-1]))
        return [token for event in self.events[:-1] for choice in event["choices"] for token in choice.get("token_ids") or ()]


def make_bodies() -> list[dict[str, Any]]:
    source = random.Random(1)
    common = {"ignore_eos": True, "return_token_ids": True}
    return [
        common
        | {"prompt": [20 + source.randrange(100) for _ in range(source.randrange(8, 400))], "seed": number}
        | {"max_tokens": source.randrange(50, 400), "presence_penalty": 0.5 * (number % 2)}
        for number in range(NUM_BODIES)
    ]


async def read(cell: Cell, reader: Reader, gateway: str, tally: Tally, resumable: bool) -> None:
    """One stream to its end; ConnectionError when it broke with its gateway and cannot go on."""
    deaths = tally.deaths[gateway]
    try:
        await reader.begin(cell.url(gateway))
    except aiohttp.ClientConnectionError:
        if not reader.events:
            raise ConnectionError from None  # nothing was answered yet: the client asks again, elsewhere
    ended = reader.done or (reader.events and "error" in reader.events[-1])
    if not ended and tally.deaths[gateway] == deaths:
        raise ValueError(f"a stream broke although {gateway} lives")
    if not ended and resumable:
        tally.gateways[reader.number] = other = GATEWAYS[gateway == "g0"]
        await reader.to_the_end([cell.url(other), cell.url(gateway)])
        tally.resumes += reader.num_resumes
    elif not ended:
        tally.own_sockets += 1
        raise ConnectionError


async def ask_on(cell: Cell, number: int, bodies: list[dict[str, Any]], expected: list[list[int]], tally: Tally) -> None:
    """One client: the next request follows the last answer, at either gateway. A refusal before it began is tried again."""
    source, resumable = random.Random(number), number % 2 == 0
    while True:
        at, gateway = source.randrange(len(bodies)), source.choice(GATEWAYS)
        reader = Reader(cell, bodies[at], number, tally)
        tally.gateways[number] = gateway
        try:
            await read(cell, reader, gateway, tally, resumable)
            tally.wrong += reader.ids != expected[at]
            tally.answered["resumable" if resumable else "plain"] += 1
        except ConnectionError:
            tally.on_break(number)
            await asyncio.sleep(0.1)
        except Refused as refusal:
            if refusal.status != 503 or reader.events:
                tally.failures.append(str(refusal))
            await asyncio.sleep(0.1)
        except ValueError as error:
            tally.failures.append(str(error))
        tally.on_end(number)


class Books:
    """The scheduler's counters over all its lives: each begins at 0."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._ended: Counter[str] = Counter()
        self._now: dict[str, float] = {}

    async def look(self) -> None:
        try:
            self._now = await self._cell.metrics()
        except aiohttp.ClientError:
            return  # it is being started

    def end_life(self) -> None:
        self._ended.update({name: value for name, value in self._now.items() if name.endswith("_total")})
        self._now = {}

    def total(self, name: str) -> float:
        return self._ended[f"quire_{name}_total"] + self._now.get(f"quire_{name}_total", 0.0)


async def trouble(cell: Cell, until: float, every_s: float, at_once: int, tally: Tally, books: Books) -> None:
    source = random.Random(2)
    while time.monotonic() + every_s < until:
        await asyncio.sleep(every_s)
        await books.look()
        victims = tuple(sorted(source.sample(ROLES, at_once)))
        if "scheduler" in victims:
            books.end_life()
        tally.on_kill(victims)
        await asyncio.gather(*(cell.restart(victim) for victim in victims))
    await asyncio.sleep(max(0.0, until - time.monotonic()))
    tally.settle()


async def hit_rate(cell: Cell) -> float:
    """Share of the prompt tokens of some prompts of its own that the cache holds."""
    cached = asked = 0
    for number in range(NUM_PROBES):
        answer = await cell.complete(
            {"prompt": [20 + number, *(20 + each % 200 for each in range(320))], "max_tokens": 1, "seed": 1}
        )
        cached += answer.usage["prompt_tokens_details"]["cached_tokens"]
        asked += answer.usage["prompt_tokens"]
    return cached / asked


async def hit_rates(cell: Cell) -> tuple[float, float]:
    """Before and after a scheduler is killed, under load."""
    await hit_rate(cell)
    before = await hit_rate(cell)
    await cell.restart("scheduler")
    await asyncio.sleep(cell.config.silence_s)
    await cell.ready()
    return before, await hit_rate(cell)


def report(tally: Tally, books: Books) -> None:
    kills = ", ".join(f"{role} {count}" for role, count in sorted(tally.deaths.items()))
    answers = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.answered.items()))
    print(f"killed: {kills}; answers: {answers}; {len(tally.failures)} failed, {tally.wrong} wrong")
    print(f"{tally.resumes} resumes at another gateway; {tally.own_sockets} plain streams broke with their gateway")
    for failure in tally.failures[:5]:
        print("  ", failure)
    for role, pauses in sorted(tally.pauses.items()):
        if pauses:
            ordered = sorted(pauses)
            p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
            print(
                f"{role:>14}: {len(ordered)} streams under way, pause p50 {p50:.2f} s, p99 {p99:.2f} s, max {ordered[-1]:.2f} s"
            )
    print(", ".join(f"{name} {books.total(name):g}" for name in CLEAN))


async def run(minutes: float, every_s: float, at_once: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        gateway_toys.write_model(Path(folder), gateway_toys.byte_level())
        async with running(Path(folder), "--delay-s=0.02", "--num-pages=4097", workers=2, gateways=2) as cell:
            tally, books, bodies = Tally(), Books(cell), make_bodies()
            readers = [Reader(cell, body, -1 - at, Tally()) for at, body in enumerate(bodies)]
            await asyncio.gather(*(reader.begin(cell.url()) for reader in readers))
            expected = [reader.ids for reader in readers]
            clients = [asyncio.create_task(ask_on(cell, each, bodies, expected, tally)) for each in range(NUM_CLIENTS)]
            try:
                before, after = await hit_rates(cell)
                print(f"hit rate before a scheduler was killed {before:.4f}, after {after:.4f}", flush=True)
                await trouble(cell, time.monotonic() + 60 * minutes, every_s, at_once, tally, books)
            finally:
                for client in clients:
                    client.cancel()
                ends = await asyncio.gather(*clients, return_exceptions=True)
            tally.failures += [repr(each) for each in ends if isinstance(each, Exception)]
            await cell.check_clean()
            await books.look()
            report(tally, books)
            bad = tally.failures or tally.wrong or any(books.total(name) for name in CLEAN) or abs(before - after) > 0.02
            return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Load with a random role killed every few seconds.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every-s", type=float, default=10.0)
    parser.add_argument("--at-once", type=int, default=1, help="roles killed together")
    parsed = parser.parse_args()
    return asyncio.run(run(parsed.minutes, parsed.every_s, parsed.at_once))


if __name__ == "__main__":
    raise SystemExit(main())

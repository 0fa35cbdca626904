"""Minutes of load with a random role killed every few seconds: failed requests, wrong answers, and how long streams paused.

    python -m benchmarks.chaos --minutes 3 --every-s 10

One gateway, a scheduler and two workers as processes over real sockets. The workers are stubs whose tokens are hashes of all
they attend to, so every answer is compared with its undisturbed one. A killed role is started again at once. A pause is the
longest time without a token of one stream that was under way when a role died, from the kill on.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import gateway_toys
from tests.chaos.cell import Cell, running

NUM_CLIENTS = 24
NUM_BODIES = 40
ROLES = ("r0", "r1", "scheduler")


@dataclass
class Tally:
    answered: int = 0
    wrong: int = 0
    failures: list[str] = field(default_factory=list)
    last_token: dict[int, float] = field(default_factory=dict)  # of streams under way, by client
    pauses: dict[str, list[float]] = field(default_factory=lambda: {role: [] for role in ROLES})
    victim: str = ""
    killed_at: float = 0.0
    waiting: dict[int, float] = field(default_factory=dict)  # client -> longest gap since the kill

    def on_token(self, client: int) -> None:
        now = time.monotonic()
        if client in self.waiting:
            self.waiting[client] = max(self.waiting[client], now - max(self.last_token[client], self.killed_at))
        self.last_token[client] = now

    def on_kill(self, victim: str) -> None:
        self.settle()
        self.victim, self.killed_at = victim, time.monotonic()
        self.waiting = dict.fromkeys(self.last_token, 0.0)

    def on_end(self, client: int) -> None:
        self.last_token.pop(client, None)
        if client in self.waiting:
            self.pauses[self.victim].append(self.waiting.pop(client))

    def settle(self) -> None:
        """Streams that are still under way have had their pause."""
        if self.victim:
            self.pauses[self.victim] += self.waiting.values()
        self.waiting = {}


def make_bodies() -> list[dict[str, Any]]:
    source = random.Random(1)
    common = {"ignore_eos": True, "return_token_ids": True, "stream": True}
    return [
        common
        | {"prompt": [20 + source.randrange(100) for _ in range(source.randrange(8, 400))], "seed": number}
        | {"max_tokens": source.randrange(50, 400), "presence_penalty": 0.5 * (number % 2)}
        for number in range(NUM_BODIES)
    ]


async def stream(cell: Cell, body: dict[str, Any], client: int, tally: Tally) -> list[int]:
    """Token ids of one answer; ValueError when it is an error."""
    ids: list[int] = []
    try:
        async with cell.client.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise ValueError(f"{response.status} {(await response.text())[:200]}")
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(str(event["error"]))
                for choice in event["choices"]:
                    if choice.get("token_ids"):
                        ids += choice["token_ids"]
                        tally.on_token(client)
    finally:
        tally.on_end(client)
    return ids


async def ask_on(cell: Cell, number: int, bodies: list[dict[str, Any]], expected: list[list[int]], tally: Tally) -> None:
    """One client: the next request follows the last answer. New requests wait while the server says that it is not ready."""
    source = random.Random(number)
    while True:
        await cell.session.wait_ready(60)
        at = source.randrange(len(bodies))
        try:
            ids = await stream(cell, bodies[at], number, tally)
        except ValueError as error:
            if str(error).startswith("503"):  # it was refused before it began, and may be sent again
                continue
            tally.failures.append(str(error))
        else:
            tally.answered += 1
            tally.wrong += ids != expected[at]


async def trouble(cell: Cell, until: float, every_s: float, tally: Tally) -> int:
    kills = 0
    source = random.Random(2)
    while time.monotonic() + every_s < until:
        await asyncio.sleep(every_s)
        victim = source.choice(ROLES)
        tally.on_kill(victim)
        await cell.restart(victim)
        kills += 1
    await asyncio.sleep(max(0.0, until - time.monotonic()))
    tally.settle()
    return kills


def report(tally: Tally, kills: int, metrics: dict[str, float]) -> None:
    print(f"{kills} kills, {tally.answered} answers, {len(tally.failures)} failed, {tally.wrong} wrong")
    for failure in tally.failures[:5]:
        print("  ", failure)
    for role, pauses in tally.pauses.items():
        if pauses:
            ordered = sorted(pauses)
            p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
            print(
                f"{role:>10}: {len(ordered)} streams under way, pause p50 {p50:.2f} s, p99 {p99:.2f} s, max {ordered[-1]:.2f} s"
            )
    for name in ("audit_violations", "internal_errors", "placement_false_credit_tokens"):
        print(f"{name}: {metrics[f'quire_{name}_total']:g}")


async def run(minutes: float, every_s: float) -> int:
    with tempfile.TemporaryDirectory() as folder:
        gateway_toys.write_model(Path(folder), gateway_toys.byte_level())
        async with running(Path(folder), "--delay-s=0.02", workers=2) as cell:
            tally, bodies = Tally(), make_bodies()
            expected = await asyncio.gather(*(stream(cell, body, -1 - at, tally) for at, body in enumerate(bodies)))
            clients = [asyncio.create_task(ask_on(cell, each, bodies, expected, tally)) for each in range(NUM_CLIENTS)]
            kills = await trouble(cell, time.monotonic() + 60 * minutes, every_s, tally)
            for client in clients:
                client.cancel()
            broken = [each for each in await asyncio.gather(*clients, return_exceptions=True) if isinstance(each, Exception)]
            tally.failures += [repr(each) for each in broken]
            report(tally, kills, await cell.check_clean())
            return 1 if tally.failures or tally.wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Load with a random role killed every few seconds.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every-s", type=float, default=10.0)
    parsed = parser.parse_args()
    return asyncio.run(run(parsed.minutes, parsed.every_s))


if __name__ == "__main__":
    raise SystemExit(main())

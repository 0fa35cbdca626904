"""Three times what the cell can compute, for minutes: goodput beside its peak, how refusals read, and what is left afterwards.

    python -m benchmarks.overload --seconds 120 --times 3

A gateway, a scheduler and a stub worker (16 rows, 50 ms a step) as processes. The peak is what clients get that always keep one
request more under way than fits. Then requests arrive at so many times the peak's rate, whether answered or not. Goodput: the
tokens of answers that were complete. Meanwhile /ready of the gateway and /metrics of the scheduler are asked now and then.
"""

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests import gateway_toys
from tests.chaos.cell import Cell, running

ROWS = 16
QUEUED = 32
OUTPUT_TOKENS = 20
PEAK_S = 20.0
SETTLE_S = 3.0


@dataclass
class Tally:
    statuses: Counter[int] = field(default_factory=Counter)
    unexplained: int = 0  # refusals without Retry-After, limit or predicted wait
    latencies: list[float] = field(default_factory=list)  # of answers
    retry_after: Counter[int] = field(default_factory=Counter)
    last_text: str = ""

    @property
    def num_tokens(self) -> int:
        return OUTPUT_TOKENS * self.statuses[200]


async def ask(cell: Cell, number: int, tally: Tally) -> None:
    body = {"prompt": [20 + number % 97, 20 + number // 97 % 97, 30], "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    started = time.monotonic()
    async with cell.client.post(f"{cell.url('g0')}/v1/completions", json=body | {"seed": number}) as response:
        answer = await response.json()
    tally.statuses[response.status] += 1
    if response.status == 200:
        assert answer["usage"]["completion_tokens"] == OUTPUT_TOKENS
        tally.latencies.append(time.monotonic() - started)
        return
    tally.last_text = answer["error"]["message"]
    retry_after = int(response.headers.get("Retry-After", "0"))
    tally.retry_after[retry_after] += 1
    tally.unexplained += retry_after < 1 or f"at most {QUEUED} may; the predicted wait is" not in tally.last_text


async def peak(cell: Cell) -> Tally:
    tally, end = Tally(), time.monotonic() + PEAK_S

    async def client(number: int) -> None:
        while time.monotonic() < end:
            await ask(cell, number, tally)
            number += ROWS + 1

    await asyncio.gather(*(client(number) for number in range(ROWS + 1)))
    return tally


async def flood(cell: Cell, rate: float, seconds: float) -> tuple[Tally, float]:
    """Requests at this rate; the goodput of the time in which they arrive, once the queue is full."""
    tally, begin = Tally(), time.monotonic()
    tasks: set[asyncio.Task[None]] = set()
    number, before, since = 0, 0, 0.0
    while (now := time.monotonic()) < begin + seconds:
        if not since and now > begin + SETTLE_S:
            before, since = tally.num_tokens, now
        while number < (now - begin) * rate:
            task = asyncio.create_task(ask(cell, number, tally))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            number += 1
        await asyncio.sleep(0.005)
    goodput = (tally.num_tokens - before) / (time.monotonic() - since)
    await asyncio.gather(*tasks)
    return tally, goodput


async def probe(url: str, cell: Cell, times_ms: list[float]) -> None:
    """How long answers to a watcher take, until cancelled."""
    while True:
        started = time.perf_counter()
        async with cell.client.get(url) as response:
            assert response.status == 200
            await response.read()
        times_ms.append(1000 * (time.perf_counter() - started))
        await asyncio.sleep(0.1)


def memory_mib(cell: Cell) -> dict[str, float]:
    return {name: role.resident_bytes / 2**20 for name, role in cell.roles.items()}


async def run(seconds: float, times: float) -> int:
    with tempfile.TemporaryDirectory() as folder:
        gateway_toys.write_model(Path(folder), gateway_toys.byte_level())
        flags = ("--delay-s=0.05", f"--max-num-seqs={ROWS}")
        async with running(Path(folder), *flags, gateways=1, max_queued_requests=QUEUED, silence_s=5.0) as cell:
            calm = await peak(cell)
            most = calm.num_tokens / PEAK_S
            memory = memory_mib(cell)
            urls = {"/ready": f"{cell.url('g0')}/ready", "/metrics": f"http://127.0.0.1:{cell.config.metrics_port}/metrics"}
            probes: dict[str, list[float]] = {name: [] for name in urls}
            watchers = [asyncio.create_task(probe(url, cell, probes[name])) for name, url in urls.items()]
            tally, goodput = await flood(cell, times * most / OUTPUT_TOKENS, seconds)
            for watcher in watchers:
                watcher.cancel()
            found = await cell.check_clean()
            grown = {name: f"{memory[name]:.0f} -> {value:.0f}" for name, value in memory_mib(cell).items()}
            ordered = sorted(tally.latencies)
            print(f"peak {most:.0f} tokens/s; at {times:g} times as many requests {goodput:.0f} ({goodput / most:.1%})")
            print(f"statuses {dict(tally.statuses)}, {tally.unexplained} refusals unexplained")
            print(f"Retry-After in s: {dict(sorted(tally.retry_after.items()))}")
            print(f"e.g.: {tally.last_text}")
            print(f"answers took p50 {ordered[len(ordered) // 2]:.2f} s, p99 {ordered[int(len(ordered) * 0.99)]:.2f} s")
            for name, times_ms in probes.items():
                spread = sorted(times_ms)
                middle, high = spread[len(spread) // 2], spread[int(len(spread) * 0.99)]
                print(f"{name} in ms under this load: p50 {middle:.1f}, p99 {high:.1f}, max {spread[-1]:.1f} of {len(spread)}")
            print(f"own memory in MiB: {grown}; rejected {found['quire_rejected_sequences_total{queue_full}']:.0f}")
            bad = set(tally.statuses) - {200, 429} or tally.unexplained or goodput < 0.9 * most
            return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="More requests than can be computed.")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--times", type=float, default=3.0, help="arrivals over the rate at the peak")
    parsed = parser.parse_args()
    return asyncio.run(run(parsed.seconds, parsed.times))


if __name__ == "__main__":
    raise SystemExit(main())

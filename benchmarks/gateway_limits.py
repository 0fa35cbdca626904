"""What one gateway process bears: many streams at once, a long text among them, long prompts of token ids.

usage: python -m benchmarks.gateway_limits [--streams 2000] [--pace 10] [--tokens 200] [--requests 256]

Gateway, fake scheduler (benchmarks.gateway_relay) and most clients are processes of their own; this one watches. It opens some
streams itself and notes when their chunks come, and asks /health all the while. In the second half of the streams it has 1 MB
texts tokenized, one after the other. Then prompts of token ids arrive all at once: the gateway's processor time for each, from
connection to [DONE], beside that of a prompt of 3 ids.
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import uvloop

from benchmarks.gateway_relay import TEXT, Stream, child, cpu_s, wait_ready
from shared import model_store
from shared.config import Config

ASCII_TEXT = "The quick brown fox jumps over the lazy dog. "  # every token completes a character, so every token is a chunk
WATCHED = 20  # streams that this process reads
HEALTH_EVERY_S = 0.05
TARGET_HEALTH_MS, TARGET_RISE_MS = 50, 20
TARGETS_MS = {8256: 1.5, 512: 0.3}  # by token ids of a prompt


class Watched(Stream):
    """A stream that notes when its chunks come."""

    def __init__(self, head: bytes) -> None:
        super().__init__(head)
        self.times: list[float] = []

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.times.append(time.monotonic())


def percentile_ms(values_s: list[float], share: float) -> float:
    ordered = sorted(values_s)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def gaps_ms_p99(streams: list[Watched], start: float, end: float) -> float:
    gaps = [
        later - earlier
        for stream in streams
        for earlier, later in zip(stream.times, stream.times[1:], strict=False)
        if start <= earlier and later <= end
    ]
    return percentile_ms(gaps, 0.99)


@asynccontextmanager
async def gateway(folder: Path, streams: int, tokens: int, pace: float) -> AsyncIterator[tuple[str, int]]:
    """A gateway over a fake scheduler that plays once so many streams are there: its address and process id."""
    me = ("-m", "benchmarks.gateway_relay", "--role", "scheduler", "--streams", streams, "--tokens", tokens)
    scheduler = child(*me, "--pace", pace, "--model", folder, "--text", ASCII_TEXT)
    assert scheduler.stdout is not None
    address = (await asyncio.to_thread(scheduler.stdout.readline)).strip()
    port = random.randrange(20000, 30000)
    flags = ("--model", folder, f"--port={port}", f"--gateway-link={address}", "--silence-s=30", "--log-level=warning")
    process = child("-m", "gateway", *flags, "--write-buffer-bytes", 2**24)
    try:
        await wait_ready(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        for each in (process, scheduler):
            each.kill()
            each.wait()


def head(prompt: list[int], tokens: int) -> bytes:
    wanted = {"prompt": prompt, "stream": True, "max_tokens": tokens, "ignore_eos": True}
    body = json.dumps(wanted | {"stream_options": {"include_usage": True}}).encode()
    kind = "Content-Type: application/json\r\nConnection: close"
    return f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def watch_health(client: aiohttp.ClientSession, seen_s: list[float]) -> None:
    while True:
        started = time.monotonic()
        async with client.get("/health") as response:
            assert response.status == 200
        seen_s.append(time.monotonic() - started)
        await asyncio.sleep(HEALTH_EVERY_S)


async def tokenize(client: aiohttp.ClientSession, until: float) -> int:
    """How many texts of 1 MB were tokenized until then."""
    body, count = json.dumps({"prompt": TEXT * (2**20 // len(TEXT.encode()))}).encode(), 0
    while time.monotonic() < until:
        async with client.post("/tokenize", data=body, headers={"Content-Type": "application/json"}) as response:
            assert response.status == 200 and len(await response.read()) > 2**20  # hundreds of thousands of ids
        count += 1
    return count


async def many_streams(folder: Path, streams: int, tokens: int, pace: float) -> None:
    loop = asyncio.get_running_loop()
    async with gateway(folder, streams, tokens, pace) as (url, pid), aiohttp.ClientSession(url) as client:
        host, port = url.removeprefix("http://").split(":")
        me = ("-m", "benchmarks.gateway_relay", "--role", "client", "--url", url, "--tokens", tokens)
        others = child(*me, "--streams", streams - WATCHED)
        made = [await loop.create_connection(lambda: Watched(head([5, 6, 7], tokens)), host, int(port)) for _ in range(WATCHED)]
        watched = [stream for _, stream in made]
        while not all(stream.first for stream in watched):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        health_s: list[float] = []
        probe = asyncio.create_task(watch_health(client, health_s))
        before, started = sum(cpu_s(pid)), time.monotonic()
        middle, end = started + 0.45 * tokens / pace, started + 0.9 * tokens / pace
        await asyncio.sleep(middle - started)
        busy, num_alone = 100 * (sum(cpu_s(pid)) - before) / (time.monotonic() - started), len(health_s)
        count = await tokenize(client, end)
        probe.cancel()
        report_streams(watched, health_s, num_alone, (started + 1, middle, end), count)
        await asyncio.gather(*(stream.done for stream in watched))
        assert all(b"data: [DONE]" in stream.tail for stream in watched)
        output, _ = await asyncio.to_thread(others.communicate)
        assert json.loads(output)["completion"] == tokens * (streams - WATCHED)
    print(f"all {streams} streams ended with their {tokens} tokens; the gateway was {busy:.0f} % busy before the texts")


def report_streams(
    watched: list[Watched], health_s: list[float], num_alone: int, times: tuple[float, float, float], count: int
) -> None:
    start, middle, end = times
    for label, seen in (("streams alone", health_s[:num_alone]), ("with 1 MB texts", health_s[num_alone:])):
        most = f"p99 {percentile_ms(seen, 0.99):.1f} ms, longest {percentile_ms(seen, 1):.1f} ms of {len(seen)}"
        print(f"/health, {label}: {most} (target {TARGET_HEALTH_MS} ms)")
    alone, beside = gaps_ms_p99(watched, start, middle), gaps_ms_p99(watched, middle, end)
    rise = f"rise {beside - alone:.1f} ms (target {TARGET_RISE_MS} ms)"
    print(f"gap p99 {alone:.1f} ms alone, {beside:.1f} ms while {count} texts of 1 MB were tokenized: {rise}")


async def admission(folder: Path, requests: int, num_ids: int) -> float:
    """Milliseconds of the gateway's processor time for each of so many requests that come at once."""
    rng, loop = random.Random(num_ids), asyncio.get_running_loop()
    heads = [head([rng.randrange(5, 40_000) for _ in range(num_ids)], 1) for _ in range(requests)]
    async with gateway(folder, requests, 1, 0) as (url, pid):
        host, port = url.removeprefix("http://").split(":")
        spent = []
        for _ in range(3):
            before = sum(cpu_s(pid))
            made = [await loop.create_connection(lambda each=each: Stream(each), host, int(port)) for each in heads]  # type: ignore[misc]
            await asyncio.gather(*(stream.done for _, stream in made))
            spent.append(1000 * (sum(cpu_s(pid)) - before) / requests)
            for transport, _ in made:
                transport.close()
        return min(spent)


async def measure(arguments: argparse.Namespace) -> None:
    folder = model_store.resolve("", Config().cache_dir)
    await many_streams(folder, arguments.streams, arguments.tokens, arguments.pace)
    least = await admission(folder, arguments.requests, 3)
    print(f"a request of 3 ids and 1 token costs the gateway {least:.2f} ms")
    for num_ids, target_ms in TARGETS_MS.items():
        took = await admission(folder, arguments.requests, num_ids)
        print(f"a request of {num_ids} ids {took:.2f} ms: {took - least:.2f} ms more (target {target_ms} ms)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--pace", type=float, default=10, help="tokens a second of each stream")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--requests", type=int, default=256)
    arguments = parser.parse_args()
    print(f"{arguments.streams} streams at {arguments.pace:g} tokens/s, load {os.getloadavg()[0]:.1f}")
    uvloop.run(measure(arguments))


if __name__ == "__main__":
    main()

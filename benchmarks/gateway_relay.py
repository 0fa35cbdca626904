"""Tokens a second that one gateway process relays: a fake scheduler, the real gateway and clients, in processes of their own.

usage: python -m benchmarks.gateway_relay [--streams 256] [--tokens 400] [--clients 1] [--chat] [--runs 3] [--steps 200,300,400]

The fake scheduler speaks the real Hub and sends Tokens with a row for every stream, so many steps a second (0: as fast as
it may; then steps pile up and share writes, which flatters). Clients check that every stream ends well with all its
tokens; they are bare sockets, so that the gateway and not its client is measured.
Prints tokens/s, the processor time the gateway spends on a token (hardly changed by who else uses the machine; user + system),
and from the two how busy it is.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import aiohttp
import uvloop

from gateway.tokenizer import Tokenizer
from scheduler.outbox import Outbox
from shared import model_store
from shared.codec import Codec
from shared.config import Config
from shared.messages import (
    GATEWAY_TO_SCHEDULER,
    PROTOCOL,
    Abort,
    Finish,
    FromGateway,
    GatewayHello,
    GatewayWelcome,
    Status,
    Submit,
)
from shared.wire import Hub

ROOT = Path(__file__).resolve().parents[1]
TEXT = "The quick brown fox jumps over the lazy dog, and 你好 comes after a naïve café. "


@dataclass
class Options:
    streams: int
    tokens: int
    clients: int
    chat: bool
    runs: int
    steps: list[float]


class Relay:
    """The fake scheduler: when all streams are there, plays every step of all of them."""

    def __init__(self, streams: int, tokens: int, pace: float, ids: list[int]) -> None:
        self.streams, self.tokens, self.pace, self.ids = streams, tokens, pace, ids
        self.peer = ""
        self.waiting: list[int] = []
        self.hub: Hub | None = None
        self.plays: set[asyncio.Task[None]] = set()

    def on_gone(self, peer: str, reason: str) -> None:
        print(f"gateway gone: {reason}", file=sys.stderr)

    def on_message(self, peer: str, message: FromGateway) -> None:
        assert self.hub is not None
        match message:
            case GatewayHello():
                self.peer = peer
                self.hub.send(peer, GatewayWelcome(PROTOCOL, 1, 16, b"k" * 32))
                self.hub.send(peer, Status("ready", "", 16_384, 10**9, 0, 0, 0.0))
            case Submit():
                self.waiting.append(message.id)
                if len(self.waiting) == self.streams:
                    task = asyncio.create_task(self.play(self.waiting))
                    self.plays.add(task)
                    task.add_done_callback(self.plays.discard)
                    self.waiting = []
            case Abort() | _:
                pass

    async def play(self, streams: list[int]) -> None:
        assert self.hub is not None
        rows = len(streams)
        box = Outbox(self.peer, "", "")
        await asyncio.sleep(0.5)  # all streams are open: the steps alone are measured
        started = time.perf_counter()
        for step in range(self.tokens):
            box.ids, box.indexes = streams, [step] * rows
            box.tokens = [self.ids[(step + row) % len(self.ids)] for row in range(rows)]
            if step == 0:
                box.started_ids, box.started_cached = streams, [0] * rows
            if step == self.tokens - 1:
                box.finished_ids, box.finished_reasons = streams, [Finish.LENGTH] * rows
            for peer, message in box.flush():
                self.hub.send(peer, message)
            if self.pace:
                await asyncio.sleep(max(0.0, started + (step + 1) / self.pace - time.perf_counter()))
            else:
                await asyncio.sleep(0)


async def schedule(streams: int, tokens: int, pace: float, folder: Path, text: str) -> None:
    ids = Tokenizer(folder).encode(text * 4, False)
    relay = Relay(streams, tokens, pace, ids)
    relay.hub = Hub("tcp://127.0.0.1:0", Codec(GATEWAY_TO_SCHEDULER), relay, heartbeat_s=0.5, silence_s=30)
    print(relay.hub.address, flush=True)
    await relay.hub.run()


class Stream(asyncio.Protocol):
    """One streaming request on a connection of its own; counts chunks as they come."""

    def __init__(self, head: bytes) -> None:
        self.head = head
        self.first = self.last = 0.0
        self.chunks = 0
        self.tail = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self.head)

    def data_received(self, data: bytes) -> None:
        self.last = time.monotonic()
        count = data.count(b"data: {")
        if count and not self.chunks:
            self.first = self.last
        self.chunks += count
        self.tail = (self.tail + data)[-600:] if len(data) < 600 else data[-600:]
        if data.endswith(b"0\r\n\r\n") and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the gateway closed the stream"))


async def client(url: str, streams: int, tokens: int, chat: bool) -> None:
    """Open the streams; when all have ended, print what was seen by the clock that all processes share."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": [5, 6, 7]}
    options = {"stream_options": {"include_usage": True}}
    body = json.dumps({**prompt, **options, "stream": True, "max_tokens": tokens, "ignore_eos": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(lambda: Stream(head + body), host, int(port)) for _ in range(streams)]
    await asyncio.gather(*(stream.done for _, stream in made))
    completion = 0
    for transport, stream in made:
        transport.close()
        assert stream.tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), stream.tail
        completion += json.loads(stream.tail.split(b"data: ")[-2].split(b"\n")[0])["usage"]["completion_tokens"]
    first, last = min(stream.first for _, stream in made), max(stream.last for _, stream in made)
    chunks = sum(stream.chunks for _, stream in made)
    print(json.dumps({"first": first, "last": last, "chunks": chunks, "completion": completion}))


def cpu_s(pid: int) -> tuple[float, float]:
    """Seconds of processor time so far: (user, system)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK"), int(fields[12]) / os.sysconf("SC_CLK_TCK")


def child(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *map(str, arguments)], cwd=ROOT, text=True, stdout=subprocess.PIPE, **options)


async def wait_ready(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            try:
                async with session.get(url + "/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
    raise SystemExit("the gateway did not become ready")


class Measured(NamedTuple):
    rate: float  # tokens/s
    user_us: float  # of the gateway's processor time per token
    system_us: float

    @property
    def busy(self) -> float:
        return self.rate * (self.user_us + self.system_us) / 1e4


def measure(options: Options, url: str, gateway_pid: int) -> Measured:
    share = options.streams // options.clients
    before = cpu_s(gateway_pid)
    me = ("-m", "benchmarks.gateway_relay", "--role", "client", "--url", url, "--streams", share, "--tokens", options.tokens)
    clients = [child(*me, *(["--chat"] if options.chat else [])) for _ in range(options.clients)]
    results = [json.loads(each.communicate()[0]) for each in clients]
    after = cpu_s(gateway_pid)
    total = sum(each["completion"] for each in results)
    assert total == options.streams * options.tokens, (total, options)
    # A token that is a part of a character has no chunk of its own; all others have.
    assert sum(each["chunks"] for each in results) > 0.8 * total
    seconds = max(each["last"] for each in results) - min(each["first"] for each in results)
    return Measured(total / seconds, *(1e6 * (end - start) / total for start, end in zip(before, after, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", default="200,300,400")
    parser.add_argument("--pace", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--role", default="")
    parser.add_argument("--url", default="")
    parser.add_argument("--model", default="")
    parser.add_argument("--text", default=TEXT, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = model_store.resolve(arguments.model, Config().cache_dir)
    if arguments.role == "client":
        uvloop.run(client(arguments.url, arguments.streams, arguments.tokens, arguments.chat))
        return
    if arguments.role == "scheduler":
        uvloop.run(schedule(arguments.streams, arguments.tokens, arguments.pace, folder, arguments.text))
        return
    steps = [float(each) for each in arguments.steps.split(",")]
    options = Options(arguments.streams, arguments.tokens, arguments.clients, arguments.chat, arguments.runs, steps)
    kind = "chat" if options.chat else "completions"
    print(f"{options.streams} streams of {options.tokens} tokens, {kind}, load {os.getloadavg()[0]:.1f}")
    for pace in options.steps:
        report(options, folder, pace)


def report(options: Options, folder: Path, pace: float) -> None:
    port = random.randrange(20000, 30000)
    me = ("-m", "benchmarks.gateway_relay", "--role", "scheduler", "--streams", options.streams, "--tokens", options.tokens)
    scheduler = child(*me, "--pace", pace, "--model", folder)
    assert scheduler.stdout is not None
    address = scheduler.stdout.readline().strip()
    flags = ("--model", folder, f"--port={port}", f"--gateway-link={address}", "--silence-s=30", "--log-level=warning")
    gateway = child("-m", "gateway", *flags, "--write-buffer-bytes", 2**24)
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(wait_ready(url))
        runs = [measure(options, url, gateway.pid) for _ in range(options.runs)]
        resident = int(Path(f"/proc/{gateway.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    finally:
        for process in (gateway, scheduler):
            process.kill()
            process.wait()
    middle = sorted(runs)[len(runs) // 2]
    offered = f"{pace * options.streams:.0f}" if pace else "unlimited"
    rates = " ".join(f"{each.rate:.0f}" for each in runs)
    cost = f"{middle.user_us:.1f} + {middle.system_us:.1f} us a token, {middle.busy:.0f} % busy, {resident:.0f} MiB"
    print(f"offered {offered:>9}: median {middle.rate:.0f} tokens/s ({rates}), {cost}")


if __name__ == "__main__":
    main()

"""A real scheduler process with fake replicas and a fake gateway around it, over real sockets: steps per second and its CPU.

    python -m benchmarks.scheduler_sockets [--replicas 8] [--rows 256] [--step-ms 15] [--seconds 10]

The fake replicas (one process) answer every plan step-ms after the one before; 0: at once, which shows the scheduler's limit.
About one sequence in 200 rows ends by a stop id and is replaced by a new prompt, so sequences come and go as in service.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import uvloop

from shared.codec import Codec
from shared.columns import i32
from shared.config import Config, to_flags
from shared.messages import (
    PROTOCOL,
    SCHEDULER_TO_GATEWAY,
    SCHEDULER_TO_WORKER,
    GatewayHello,
    GatewayWelcome,
    Reject,
    Status,
    StepDone,
    StepPlan,
    Submit,
    Tokens,
    WorkerHello,
)
from shared.pages import page_hashes, root_hash
from shared.sampling import Sampling
from shared.wire import Link

STOP = 2
PROMPT_TOKENS = 256
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def column_of_tokens(count: int) -> bytes:
    """Random ids; about one in 200 is the stop id."""
    return array("i", [STOP if random.random() < 1 / 200 else random.randrange(10, 30000) for _ in range(count)]).tobytes()


class Replica:
    """Answers plans in order, each step_s after the one before."""

    def __init__(self, config: Config, number: int, rows: int, step_s: float) -> None:
        self._step_s = step_s
        self._rows = rows
        self._number = number
        self._loop = asyncio.get_running_loop()
        self._free_at = 0.0  # loop time at which the device is idle
        self._columns = [column_of_tokens(rows) for _ in range(64)]
        self.num_steps = self.num_rows = 0
        name, codec = f"w/r{number}/0", Codec(SCHEDULER_TO_WORKER)
        self.link = Link(config.worker_link, name, codec, self, heartbeat_s=config.heartbeat_s, silence_s=config.silence_s)

    def hello(self) -> WorkerHello:
        pages = self._rows * 4096 // 16
        return WorkerHello(PROTOCOL, f"r{self._number}", 0, 1, 0, "m", 16, pages, self._rows + 1, 8192, 8192, b"")

    def on_lost(self, reason: str, fatal: bool) -> None:
        print(f"replica {self._number} lost the scheduler: {reason}", file=sys.stderr)

    def on_message(self, message: Any) -> None:
        if isinstance(message, StepPlan):
            now = self._loop.time()
            self._free_at = max(now, self._free_at) + self._step_s
            if self._free_at <= now:
                self._answer(message)
            else:
                self._loop.call_at(self._free_at, self._answer, message)

    def _answer(self, plan: StepPlan) -> None:
        sampled = plan.num_last + plan.num_decode
        self.num_steps += 1
        self.num_rows += sampled
        tokens = self._columns[self.num_steps % 64][: sampled * 4]
        step_us = int(self._step_s * 1e6)
        self.link.send(StepDone(plan.step, tokens, b"", 0, b"", b"", b"", 0, b"", b"", step_us))


async def run_replicas(config: Config, replicas: int, rows: int, step_s: float) -> None:
    """Until stdin says stop; every line read is answered by the counts so far."""
    all_replicas = [Replica(config, number, rows, step_s) for number in range(replicas)]
    tasks = [asyncio.create_task(replica.link.run()) for replica in all_replicas]
    while (await asyncio.to_thread(sys.stdin.readline)).strip() == "counts":
        counts = [(replica.num_steps, replica.num_rows) for replica in all_replicas]
        print(json.dumps({"at": time.monotonic(), "counts": counts}), flush=True)
    for task in tasks:
        task.cancel()


class Gateway:
    """Keeps a number of streams alive."""

    def __init__(self, config: Config, streams: int) -> None:
        self._streams = streams
        self._last_id = 0
        self.num_tokens = self.num_messages = 0
        self._welcome: GatewayWelcome | None = None
        codec = Codec(SCHEDULER_TO_GATEWAY)
        self.link = Link(
            config.gateway_link, "g/bench", codec, self, heartbeat_s=config.heartbeat_s, silence_s=config.silence_s
        )

    def hello(self) -> GatewayHello:
        return GatewayHello(PROTOCOL, "bench", "m")

    def on_lost(self, reason: str, fatal: bool) -> None:
        print(f"the gateway lost the scheduler: {reason}", file=sys.stderr)

    def on_message(self, message: Any) -> None:
        match message:
            case GatewayWelcome():
                self._welcome = message
            case Status(state="ready"):
                while self._last_id < self._streams:
                    self._submit()
            case Tokens():
                self.num_messages += 1
                self.num_tokens += len(message.tokens) // 4
                for _ in message.finished_reasons:
                    self._submit()
            case Reject():
                raise RuntimeError(message.text)

    def _submit(self) -> None:
        assert self._welcome is not None
        self._last_id += 1
        prompt = i32(random.randrange(10, 30000) for _ in range(PROMPT_TOKENS))
        root = root_hash(self._welcome.hash_key, "")
        hashes = page_hashes(self._welcome.hash_key, root, prompt, self._welcome.page_tokens)
        sampling = Sampling(num_prompt=PROMPT_TOKENS).pack()
        fields = (self._last_id, prompt, PROMPT_TOKENS, 3000, 0, i32([STOP]), sampling, b"", root, hashes, 0, "", 0.0, 0.0)
        self.link.send(Submit(*fields))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def counts(replicas: subprocess.Popen[str]) -> dict[str, Any]:
    assert replicas.stdin is not None and replicas.stdout is not None
    replicas.stdin.write("counts\n")
    replicas.stdin.flush()
    found: dict[str, Any] = json.loads(await asyncio.to_thread(replicas.stdout.readline))
    return found


async def measure(
    config: Config, args: argparse.Namespace, scheduler: subprocess.Popen[str], fake: subprocess.Popen[str]
) -> None:
    gateway = Gateway(config, args.replicas * args.rows)
    task = asyncio.create_task(gateway.link.run())
    await asyncio.sleep(args.warm_up)
    before, cpu_before, tokens_before = await counts(fake), cpu_s(scheduler.pid), gateway.num_tokens
    await asyncio.sleep(args.seconds)
    after, cpu_after, tokens_after = await counts(fake), cpu_s(scheduler.pid), gateway.num_tokens
    task.cancel()
    elapsed_s = after["at"] - before["at"]
    pairs = list(zip(after["counts"], before["counts"], strict=True))
    steps = [(now[0] - then[0]) / elapsed_s for now, then in pairs]
    rows = sum(now[1] - then[1] for now, then in pairs) / max(sum(now[0] - then[0] for now, then in pairs), 1)
    cpu = (cpu_after - cpu_before) / elapsed_s
    print(f"steps/s of a replica   {min(steps):8.1f} least {max(steps):8.1f} most   ({args.replicas} replicas)")
    print(f"steps/s in all         {sum(steps):8.1f}")
    print(f"rows per step          {rows:8.1f}")
    print(f"tokens/s to gateway    {(tokens_after - tokens_before) / elapsed_s:8.0f}")
    print(f"scheduler CPU          {cpu:8.2f} cores, {cpu / sum(steps) * 1e6:.0f} us per step")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=15.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds before the measurement")
    parser.add_argument("--links", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    ports = args.links.split(",") if args.links else [str(free_port()), str(free_port())]
    with tempfile.TemporaryDirectory() as folder:
        gateway_link, worker_link = (f"tcp://127.0.0.1:{port}" for port in ports)
        config = Config(
            gateway_link=gateway_link, worker_link=worker_link, hash_key_file=f"{folder}/hash.key", max_queued_requests=100_000
        )
        if args.links:  # this is the process of the fake replicas
            uvloop.run(run_replicas(config, args.replicas, args.rows, args.step_ms / 1e3))
            return
        scheduler = subprocess.Popen([sys.executable, "-m", "scheduler", *to_flags(config)], text=True)
        own = ["--links", ",".join(ports), "--replicas", str(args.replicas), "--rows", str(args.rows), "--step-ms"]
        fake = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scheduler_sockets", *own, str(args.step_ms)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            uvloop.run(measure(config, args, scheduler, fake))
        finally:
            for process in (fake, scheduler):
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)


if __name__ == "__main__":
    main()

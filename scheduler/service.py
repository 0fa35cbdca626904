"""The only I/O of the scheduler: two hubs, the clock, the hash key file, signals and /metrics."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from scheduler.cell import Cell
from scheduler.commit import Out
from scheduler.core import Core
from scheduler.journal import Journal
from scheduler.metrics import CellCollector
from scheduler.shelf import Shelf
from shared import keys
from shared.codec import Codec
from shared.config import Config
from shared.messages import GATEWAY_TO_SCHEDULER, WORKER_TO_SCHEDULER, Reset
from shared.observe import serve_metrics
from shared.tracing import Tracer, open_tracer
from shared.wire import Hub

log = logging.getLogger("quire.scheduler")

TICK_S = 0.1
STALL_S = 0.1  # longer than this late, the loop was blocked or the machine suspended
KEY_BYTES = 32


def load_hash_key(path: Path) -> bytes:
    """The cell's page hash key; made at the first start. Written whole or not at all, readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(KEY_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        try:
            with contextlib.suppress(FileExistsError):  # another process was first: its key is the cell's
                os.link(draft, path)
        finally:
            draft.unlink()
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise ValueError(f"{path} has {len(key)} bytes, a page hash key has {KEY_BYTES}; delete it to make a new one")
    return key


def key_path(config: Config) -> Path:
    return Path(config.hash_key_file or Path(config.cache_dir) / "hash.key").expanduser()


def new_cell(config: Config, hash_key: bytes) -> Cell:
    return Cell(
        page_tokens=config.block_size,
        hash_key=hash_key,
        epoch=time.time_ns() // 1_000_000,  # grows with every start
        credits=config.credits,
        max_queued=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        max_wait_s=config.max_wait_s,
        step_timeout_s=config.step_timeout_s,
        shelf=Shelf(config.resume_grace_s),
    )


class _Side:
    """Handler of one hub: messages of its peers go to one method of the core."""

    def __init__(self, service: "Service", handle: Callable[[str, Any, float], list[Out]]) -> None:
        self._service = service
        self._handle = handle

    def on_message(self, peer: str, message: Any) -> None:
        service = self._service
        try:
            out = self._handle(peer, message, service.now())
        except Exception:  # one message must not end the cell; its sender starts anew
            service.cell.counters.internal_errors += 1
            log.exception("message failed", extra={"peer": peer, "message_type": type(message).__name__})
            out = [*service.core.on_gone(peer, "internal error", service.now()), (peer, Reset("internal error", False))]
        service.send(out)
        service.wake()

    def on_gone(self, peer: str, reason: str) -> None:
        self._service.send(self._service.core.on_gone(peer, reason, self._service.now()))
        self._service.wake()


class Service:
    def __init__(self, config: Config, hash_key: bytes, tracer: Tracer | None = None) -> None:
        """Binds both sockets; OSError when one cannot be bound, ValueError when its keys or address cannot be used."""
        self.cell = new_cell(config, hash_key)
        self.core = Core(self.cell)
        self._journal = Journal(tracer)
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self._woken = False
        beat_s, silence_s = config.heartbeat_s, config.silence_s
        gateways, workers = _Side(self, self.core.on_gateway), _Side(self, self.core.on_worker)
        codec, key = Codec(GATEWAY_TO_SCHEDULER), keys.hub_keys(config.curve_dir, keys.GATEWAY)
        self.gateways = Hub(config.gateway_link, codec, gateways, heartbeat_s=beat_s, silence_s=silence_s, keys=key)
        try:
            codec, key = Codec(WORKER_TO_SCHEDULER), keys.hub_keys(config.curve_dir, keys.WORKER)
            self.workers = Hub(config.worker_link, codec, workers, heartbeat_s=beat_s, silence_s=silence_s, keys=key)
        except (OSError, ValueError):
            self.gateways.close()
            raise

    def send(self, out: list[Out]) -> None:
        for peer, message in out:
            hub = self.gateways if peer.startswith("g/") else self.workers
            hub.send(peer, message)  # a peer that cannot be reached is reported by on_gone

    def wake(self) -> None:
        """Plan once for all messages that arrived together."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._woken = False
        start = time.perf_counter()
        try:
            out = self.core.pump(self.now())
        except Exception:
            self.cell.counters.internal_errors += 1
            log.exception("planning failed")
            out = self.core.start_over("internal error")
        self.cell.counters.plan_s += time.perf_counter() - start
        self.send(out)
        if self.cell.ended:
            self._journal.write(self.cell.ended, self.now())

    async def _tick(self) -> None:
        while True:
            slept = self.now()
            await asyncio.sleep(TICK_S)
            stalled_s = self.now() - slept - TICK_S
            if stalled_s > STALL_S:
                self.core.excuse(stalled_s)
            self.send(self.core.tick(self.now()))
            self._pump()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until stop is set, then tell everybody to look for the next scheduler."""
        tasks = [asyncio.create_task(work) for work in (self.gateways.run(), self.workers.run(), self._tick())]
        stopped = asyncio.create_task(_wait(stop))
        try:
            await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            self.send(self.core.leave("the scheduler is shutting down", self.now()))
        finally:
            for task in (*tasks, stopped):
                task.cancel()
            self.gateways.close()
            self.workers.close()


async def _wait(stop: asyncio.Event) -> None:
    await stop.wait()


async def serve(config: Config) -> None:
    """Run the scheduler until SIGTERM or SIGINT."""
    tracer = open_tracer(config, "scheduler")
    service = Service(config, load_hash_key(key_path(config)), tracer)
    registry = CollectorRegistry()
    registry.register(CellCollector(service.cell))
    serve_metrics(registry, config.metrics_port, config.metrics_host)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    log.info("scheduler ready", extra={"gateways": service.gateways.address, "workers": service.workers.address})
    await service.run(stop)
    if tracer is not None:
        tracer.close()

"""The worker's asyncio thread: its link to the scheduler, heartbeats, drain. The only I/O of this role."""

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, assert_never

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gpu_worker.gpu_load import gpu_utilization
from gpu_worker.inventory import Inventory
from gpu_worker.loading import Loaded, load
from gpu_worker.memory import memory_in_use
from gpu_worker.parallel.group import RESTART_EXIT, GroupError, Seat, leave
from gpu_worker.parallel.lifeline import Lifeline
from gpu_worker.parallel.turns import Turns
from gpu_worker.steps import Steps
from shared import keys
from shared.codec import Codec
from shared.config import FATAL_EXIT, BadConfig, Config
from shared.messages import (
    PROTOCOL,
    SCHEDULER_TO_WORKER,
    Drain,
    Fault,
    Reset,
    StepDone,
    StepPlan,
    ToWorker,
    WorkerAlive,
    WorkerHello,
    WorkerWelcome,
)
from shared.model_folder import ModelError
from shared.observe import serve_metrics, setup_logging
from shared.wire import Link

log = logging.getLogger("quire.worker")

ALIVE_S = 1.0
DRAINED_S = 1.0  # a draining worker that gets no plan for this long has nothing left to do


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.steps = Counter("quire_worker_steps", "Steps finished", registry=self.registry)
        self.tokens = Counter("quire_worker_sampled_tokens", "Tokens sampled", registry=self.registry)
        self.faults = Counter("quire_worker_faults", "Steps that failed", registry=self.registry)
        self.step_s = Histogram("quire_worker_step_seconds", "Device time of a step", registry=self.registry)
        self.memory = Gauge("quire_worker_memory_bytes", "Device memory in use", registry=self.registry)
        text = "Share of time in which the device computed: NVML's on a GPU, that of the steps elsewhere"
        self.utilization = Gauge("quire_worker_utilization_ratio", text, registry=self.registry)
        self.start = Gauge("quire_worker_start_seconds", "What the start took", ["phase"], registry=self.registry)


class Service:
    """Handler of the link and of the step threads. All methods run on the asyncio loop."""

    def __init__(self, config: Config, loaded: Loaded) -> None:
        self._loaded = loaded
        self._replica = config.name or f"{socket.gethostname()}-{os.getpid()}"
        self.metrics = Metrics()
        for phase, seconds in loaded.phases.seconds.items():
            self.metrics.start.labels(phase).set(seconds)
        self._process = secrets.randbits(62)
        self._inventory = Inventory(loaded.memory.num_slots, loaded.memory.page_tokens)
        self._incarnation = 1
        self._last_step = 0
        self._in_flight = 0
        self._last_plan = 0.0  # loop time
        self._draining = ""
        self._unready = "the scheduler has not been reached yet"
        self.ended = asyncio.Event()
        self.exit_code = 0
        self._loop = asyncio.get_running_loop()
        self._steps = Steps(loaded.runner, self, self._loop)
        self._step_timeout_s = config.step_timeout_s
        self._group = group = loaded.group
        self._turns = Turns(group, self._steps.put) if group else None
        self._lifeline = Lifeline(group, config.heartbeat_s, config.silence_s) if group else None
        self._link = Link(
            config.worker_link,
            f"w/{self._replica}/{group.rank if group else 0}",
            Codec(SCHEDULER_TO_WORKER),
            self,
            heartbeat_s=config.heartbeat_s,
            silence_s=config.silence_s,
            keys=keys.link_keys(config.curve_dir, keys.WORKER),
        )

    async def run(self) -> int:
        """Serve plans until drained or refused; the exit code."""
        self._steps.start()
        if self._turns is not None and self._lifeline is not None:
            self._turns.start()
            self._lifeline.start()
        alive = asyncio.create_task(self._alive())
        link = asyncio.create_task(self._link.run())
        await self.ended.wait()
        alive.cancel()
        link.cancel()
        await asyncio.gather(alive, link, return_exceptions=True)
        await asyncio.to_thread(self._stop_threads)
        return self.exit_code

    def unready(self) -> str:
        """Why this worker gets no work; empty: it does. From any thread."""
        return f"draining: {self._draining}" if self._draining else self._unready

    def _stop_threads(self) -> None:
        if self._turns is not None and self._lifeline is not None:
            self._lifeline.stop()
            self._turns.stop()
        self._steps.stop()

    def drain(self, reason: str) -> None:
        """Tell the scheduler that this worker leaves, finish what it still sends, then end. Asked twice: end at once."""
        if self._draining:
            self.ended.set()
            return
        self._draining = reason
        self._last_plan = self._loop.time()
        log.info("draining", extra={"reason": reason})
        if not self._link.send(Drain(reason)):
            self.ended.set()

    # --- link ---------------------------------------------------------------------------------------------------------

    def hello(self) -> WorkerHello:
        memory = self._loaded.memory
        return WorkerHello(
            protocol=PROTOCOL,
            replica=self._replica,
            rank=self._group.rank if self._group else 0,
            tp=self._group.size if self._group else 1,
            group=self._group.number if self._group else 0,
            model=self._loaded.fingerprint,
            page_tokens=memory.page_tokens,
            num_pages=memory.num_pages,
            num_slots=memory.num_slots,
            max_batched_tokens=memory.max_batched_tokens,
            max_model_len=memory.max_model_len,
            inventory=self._inventory.column(),
            process=self._process,
        )

    def on_message(self, message: Any) -> None:
        received: ToWorker = message
        match received:
            case StepPlan():
                self._last_plan = self._loop.time()
                self._in_flight += 1
                self._inventory.on_plan(received)
                (self._turns or self._steps).put(self._incarnation, received)
                if received.opened and not (self._group and self._group.rank):
                    log.info("opened", extra={"step": received.step, "ids": received.opened.split()})
            case WorkerWelcome(epoch=epoch, credits=credits, turn=turn):
                if self._turns is not None:
                    self._turns.welcome(self._incarnation, f"{epoch}.{turn}")
                self._unready = ""
                log.info("welcome", extra={"replica": self._replica, "epoch": epoch, "credits": credits})
            case Drain(reason=reason):
                self.drain(reason)
            case Reset():
                raise AssertionError("the link handles Reset itself")
            case _:
                assert_never(received)

    def on_lost(self, reason: str, fatal: bool) -> None:
        log.warning("lost the scheduler", extra={"reason": reason, "fatal": fatal})
        self._unready = f"lost the scheduler: {reason}"
        self._new_incarnation()
        if fatal:
            self.exit_code = _refuse(f"the scheduler refused this worker: {reason}")
            self.ended.set()
        elif self._draining:
            self.ended.set()

    # --- step threads -------------------------------------------------------------------------------------------------

    def on_done(self, incarnation: int, done: StepDone) -> None:
        if incarnation != self._incarnation:
            return
        self._in_flight -= 1
        self._last_step = done.step
        self.metrics.steps.inc()
        self.metrics.tokens.inc(len(done.tokens) // 4)
        self.metrics.step_s.observe(done.step_us / 1e6)
        if self._link.send(done):
            self._inventory.on_done(done.step)

    def on_fault(self, incarnation: int, step: int, text: str, *, refused: bool) -> None:
        broken = self._group is not None and not refused  # the other ranks may be anywhere in this step
        if broken:
            self.exit_code = RESTART_EXIT
            self.ended.set()
        if incarnation != self._incarnation:
            return
        log.error("step failed: %s", text, extra={"step": step})
        self.metrics.faults.inc()
        self._link.send(Fault(step, text))
        self._link.close()  # it opens again, with a new nonce and a new hello
        self._new_incarnation()
        if not broken and not self._loaded.runner.device_works():
            self.exit_code = RESTART_EXIT
            self.ended.set()

    def _new_incarnation(self) -> None:
        if self._turns is not None:
            self._turns.lost(self._incarnation)
        self._incarnation += 1
        self._in_flight = 0
        self._inventory.on_new_incarnation()

    async def _alive(self) -> None:
        device = self._loaded.runner.device
        busy_s, since = 0.0, time.perf_counter()
        while True:
            await asyncio.sleep(ALIVE_S)
            now, was_busy_s, busy_s = time.perf_counter(), busy_s, self._steps.busy_s
            used, total = memory_in_use(device)
            self.metrics.memory.set(used)
            utilization = min(1.0, max(0.0, (busy_s - was_busy_s) / (now - since)))
            since = now
            measured = await asyncio.to_thread(gpu_utilization, device)
            utilization = utilization if measured is None else measured
            self.metrics.utilization.set(utilization)
            if self._lifeline is not None:
                self._lifeline.check()
            if self._group and self._steps.stuck_s > self._step_timeout_s:  # its collective waits in vain
                leave(f"a step has made no progress for {self._steps.stuck_s:.0f} s")
            self._link.send(WorkerAlive(self._last_step, used, total, utilization))
            if self._draining and not self._in_flight and self._loop.time() - self._last_plan >= DRAINED_S:
                self.ended.set()


def main(config: Config, seat: Seat | None = None) -> int:
    """Load the model and serve plans; the process's exit code. seat: of a rank among several."""
    setup_logging(config)
    if config.device != "cpu" and torch.cuda.device_count():
        from gpu_worker.kernels import compiling  # only here: it imports triton, which only a GPU needs

        compiling.start_processes()
    return asyncio.run(_serve(config, seat))


def _refuse(why: str) -> int:
    """Last words of a start that cannot succeed unless something is changed."""
    print(f"gpu_worker: error: {why}", file=sys.stderr)
    return FATAL_EXIT


async def _serve(config: Config, seat: Seat | None) -> int:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    # A thread that ends: as long as it lived, so would its OpenMP team, and libgomp lets nobody spin while there are more
    # threads than cores. Every product of every step would begin and end with a sleep.
    loader = ThreadPoolExecutor(1, "load")
    loading = loop.run_in_executor(loader, load, config, seat)
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stopped.is_set():  # also when loading has just ended: nobody would see the signal again
        os._exit(0)  # nothing to finish, and a reading thread cannot be interrupted
    stopping.cancel()
    loader.shutdown()
    try:
        service = Service(config, loading.result())
        serve_metrics(service.metrics.registry, config.metrics_port, config.metrics_host, service.unready)
    except (ModelError, BadConfig) as error:
        return _refuse(str(error))
    except GroupError as error:
        print(f"gpu_worker: {error}", file=sys.stderr)
        return RESTART_EXIT
    except torch.OutOfMemoryError as error:
        return _refuse(f"the device's memory does not hold the model: {error}")
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.drain, f"signal {number.name}")
    return await service.run()

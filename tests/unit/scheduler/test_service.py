"""The scheduler's process: key file, bad starts, and a real gateway link and worker link around it."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from scheduler import core, planner
from scheduler.service import Service, load_hash_key
from shared.codec import Codec
from shared.columns import i32, i64, read_i32
from shared.config import Config, to_flags
from shared.messages import (
    PROTOCOL,
    SCHEDULER_TO_GATEWAY,
    Abort,
    Finish,
    GatewayHello,
    GatewayWelcome,
    Reject,
    Status,
    Submit,
    Tokens,
)
from shared.pages import page_hashes, root_hash
from shared.sampling import Sampling
from shared.wire import Link
from tests.stub_worker import StubWorker, Trouble, running


class Gateway:
    """A gateway that keeps what it is told."""

    def __init__(self, config: Config) -> None:
        codec = Codec(SCHEDULER_TO_GATEWAY)
        self.link = Link(config.gateway_link, "g/test", codec, self, heartbeat_s=config.heartbeat_s, silence_s=config.silence_s)
        self.welcome: GatewayWelcome | None = None
        self.status: Status | None = None
        self.output: dict[int, list[int]] = {}
        self.ends: dict[int, int | str] = {}
        self.live: dict[int, Submit] = {}
        self.changed = asyncio.Event()

    def hello(self) -> GatewayHello:
        return GatewayHello(PROTOCOL, "test", "stub")

    def on_lost(self, reason: str, fatal: bool) -> None:
        self.welcome = None

    def on_message(self, message: Any) -> None:
        match message:
            case GatewayWelcome():
                self.welcome = message
                for number, submit in self.live.items():
                    self.submit(number, memoryview(submit.tokens).cast("i").tolist()[: submit.num_prompt], submit.max_new)
            case Status():
                self.status = message
            case Tokens():
                for number, token in zip(memoryview(message.ids).cast("q"), read_i32(message.tokens), strict=True):
                    self.output[number].append(token)
                for number, reason in zip(memoryview(message.finished_ids).cast("q"), message.finished_reasons, strict=True):
                    self.ends[number] = reason
                    self.live.pop(number, None)
            case Reject():
                self.ends[message.id] = message.code
                self.live.pop(message.id, None)
        self.changed.set()

    def submit(self, number: int, prompt: list[int], max_new: int, deadline_s: float = 0.0) -> None:
        assert self.welcome is not None
        output = self.output.setdefault(number, [])
        root = root_hash(self.welcome.hash_key, "")
        tokens = i32(prompt + output)
        hashes = page_hashes(self.welcome.hash_key, root, tokens, self.welcome.page_tokens)
        sampling = Sampling(num_prompt=len(prompt)).pack()
        self.live[number] = Submit(
            number, tokens, len(prompt), max_new, 0, b"", sampling, b"", root, hashes, 0, "", 0.0, deadline_s
        )
        self.link.send(self.live[number])

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        gateway_link=f"tcp://127.0.0.1:{free_port()}",
        worker_link=f"tcp://127.0.0.1:{free_port()}",
        heartbeat_s=0.1,
        silence_s=0.6,
        hash_key_file=str(tmp_path / "hash.key"),
    )


@pytest.fixture
async def service(config: Config) -> AsyncIterator[Service]:
    service = Service(config, bytes(32))
    stop = asyncio.Event()
    task = asyncio.create_task(service.run(stop))
    yield service
    stop.set()
    await task
    assert service.cell.counters.internal_errors == 0
    assert service.cell.counters.audit_violations == 0


@pytest.fixture
async def gateway(config: Config, service: Service) -> AsyncIterator[Gateway]:
    gateway = Gateway(config)
    task = asyncio.create_task(gateway.link.run())
    await gateway.until(lambda: gateway.welcome)
    yield gateway
    task.cancel()


def held(service: Service) -> int:
    return sum(replica.pool.held for replica in service.cell.replicas.values())


def test_hash_key_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "hash.key"
    key = load_hash_key(path)
    assert len(key) == 32 and load_hash_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["hash.key"]


def test_broken_hash_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hash.key").write_bytes(b"short")
    with pytest.raises(ValueError, match="5 bytes"):
        load_hash_key(tmp_path / "hash.key")


async def test_sequence_runs_over_real_sockets(config: Config, service: Service, gateway: Gateway) -> None:
    await gateway.until(lambda: gateway.status)
    assert gateway.status is not None and gateway.status.state == "loading"
    async with running(StubWorker(config, script=[5, 6, 7])):
        gateway.submit(1, list(range(40)), 7)  # waits until the worker is there
        await gateway.until(lambda: 1 in gateway.ends)
        assert gateway.output[1] == [5, 6, 7, 5, 6, 7, 5] and gateway.ends[1] == Finish.LENGTH
        await gateway.until(lambda: gateway.status and gateway.status.state == "ready" and not gateway.status.num_running)
        assert gateway.status.pool_tokens == 1024 * 16
        assert held(service) == 0


async def test_stream_outlives_its_worker(config: Config, service: Service, gateway: Gateway) -> None:
    async with running(StubWorker(config, script=lambda prompt, index: index, delay_s=0.01)):
        gateway.submit(1, [1, 2, 3], 40)
        await gateway.until(lambda: len(gateway.output.get(1, [])) > 5)
    async with running(StubWorker(config, script=lambda prompt, index: index)):
        await gateway.until(lambda: 1 in gateway.ends)
    assert gateway.output[1] == list(range(40)) and gateway.ends[1] == Finish.LENGTH
    assert service.cell.counters.failovers == 1


async def test_faulting_step_is_retried_and_a_hung_worker_is_replaced(
    config: Config, service: Service, gateway: Gateway
) -> None:
    service.cell.step_timeout_s = 1.0
    async with running(StubWorker(config, script=[4], trouble=Trouble(fault_at_step=2, freeze_at_step=6))):
        gateway.submit(1, [1, 2, 3], 30)
        await gateway.until(lambda: 1 in gateway.ends)
    assert gateway.output[1] == [4] * 30 and gateway.ends[1] == Finish.LENGTH
    assert service.cell.counters.failovers == 2


async def test_300_aborted_streams_leave_nothing(config: Config, service: Service, gateway: Gateway) -> None:
    """B41: aborted while queued, in prefill and while decoding; then a canary runs at once."""
    async with running(StubWorker(config, script=[3], delay_s=0.005, num_slots=65)):
        for number in range(1, 301):
            gateway.submit(number, [number] * (number % 90 + 1), 500)
        await gateway.until(lambda: sum(map(len, gateway.output.values())) > 500)
        gateway.link.send(Abort(i64(range(1, 301)), "gone"))
        await gateway.until(lambda: len(gateway.ends) == 300)
        assert set(gateway.ends.values()) == {Finish.ABORT} and service.cell.counters.aborts == 300
        assert held(service) == 0 and not service.cell.num_running and not len(service.cell.waiting)
        gateway.submit(301, [9, 9], 3)
        await gateway.until(lambda: 301 in gateway.ends)
        assert gateway.output[301] == [3, 3, 3]


async def test_silent_gateway_is_aborted(config: Config, service: Service, gateway: Gateway) -> None:
    async with running(StubWorker(config, script=[3], delay_s=0.01)):
        gateway.submit(1, [1, 2], 10_000 // 4)
        await gateway.until(lambda: gateway.output[1])
        gateway.link.close()
        for _ in range(100):
            await asyncio.sleep(0 if not service.cell.gateways else 0.05)
        assert not service.cell.gateways
        assert held(service) == 0 and not service.cell.num_running


async def test_failing_plan_round_is_survived(
    config: Config, service: Service, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = planner.plan_round

    def plan_round(cell: Any, now: float) -> Any:
        plans = original(cell, now)
        if len(gateway.output.get(1, [])) > 10:
            monkeypatch.undo()
            raise RuntimeError("plans made and lost")
        return plans

    async with running(StubWorker(config, script=lambda prompt, index: index, delay_s=0.005)):
        monkeypatch.setattr(core, "plan_round", plan_round)
        gateway.submit(1, [1, 2, 3], 60)
        await gateway.until(lambda: 1 in gateway.ends)
    assert gateway.output[1] == list(range(60)) and gateway.ends[1] == Finish.LENGTH
    assert service.cell.counters.internal_errors == 1
    service.cell.counters.internal_errors = 0  # as expected by the fixture


async def test_queue_deadline_is_an_honest_504(service: Service, gateway: Gateway) -> None:
    gateway.submit(1, [1, 2], 5, deadline_s=0.2)
    await gateway.until(lambda: 1 in gateway.ends)
    assert gateway.ends[1] == "deadline_exceeded"


def spawn(config: Config) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    command = [sys.executable, "-m", "scheduler", *to_flags(config)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


async def test_restarted_process_continues_the_stream(config: Config, tmp_path: Path) -> None:
    """SIGKILL: workers and gateways notice, say hello again, and pages come back with the inventory (S43 as well)."""
    first = spawn(config)
    gateway = Gateway(config)
    task = asyncio.create_task(gateway.link.run())
    second = None
    try:
        async with running(StubWorker(config, script=lambda prompt, index: index, delay_s=0.01)) as worker:
            await gateway.until(lambda: gateway.welcome)
            epoch = gateway.welcome.epoch  # type: ignore[union-attr]
            gateway.submit(1, list(range(100)), 120)
            await gateway.until(lambda: len(gateway.output.get(1, [])) > 20)
            first.kill()
            second = spawn(config)
            await gateway.until(lambda: 1 in gateway.ends)
            assert gateway.output[1] == list(range(120))
            assert gateway.welcome is not None and gateway.welcome.epoch > epoch
            assert len(worker.welcomes) == 2
            second.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(second.wait, 5) == 0
    finally:
        task.cancel()
        for process in (first, second):
            if process is not None:
                process.kill()
                process.communicate()


def test_port_in_use_is_one_clear_line(config: Config) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(config.worker_link.rsplit(":", 1)[1])))
        taken.listen()
        process = spawn(config)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 2
    assert config.worker_link in stderr and "in use" in stderr and "Traceback" not in stderr


def test_metrics_are_served(config: Config) -> None:
    port = free_port()
    process = spawn(Config(**{**config.__dict__, "metrics_port": port}))
    try:
        for _ in range(100):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as response:
                    text = response.read().decode()
                break
            except OSError:
                assert process.poll() is None
                time.sleep(0.1)
        assert "quire_steps_total 0.0" in text
    finally:
        process.terminate()
        _, stderr = process.communicate(timeout=10)
    assert process.returncode == 0 and "Traceback" not in stderr

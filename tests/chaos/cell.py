"""A whole cell to do harm to: a gateway on this loop; more gateways, a scheduler and stub workers as processes to be killed."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from gateway import served_model
from gateway.app import create_app, make_runner
from gateway.session import Session
from quire.machine import free_ports
from shared import model_folder
from shared.config import Config
from tests.integration.gateway_bench import Answer, parse_events

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 132  # of the stub's hashed tokens: the toy tokenizer's special tokens and the ASCII characters


class Role:
    """A child process and all lines it printed."""

    def __init__(self, *arguments: str, prefix: tuple[str, ...] = ()) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
        self._child = subprocess.Popen(
            [*prefix, sys.executable, "-m", *arguments],
            cwd=ROOT,
            env=environment | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[tuple[float, str]] = []  # (monotonic time, line)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stderr is not None
        for line in self._child.stderr:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    @property
    def resident_bytes(self) -> int:
        """Memory of the process that is its own and in RAM."""
        pages = Path(f"/proc/{self._child.pid}/statm").read_text().split()
        return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")

    @property
    def code(self) -> int | None:
        return self._child.poll()

    def signal(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._child.kill()
        self._child.wait(10)
        self._reader.join(5)
        assert self._child.stderr is not None
        self._child.stderr.close()

    async def ended(self, timeout_s: float = 15.0) -> int:
        return await asyncio.to_thread(self._child.wait, timeout_s)

    def seen(self, pattern: str) -> float:
        """When a line that matches was first printed; 0: never."""
        return next((when for when, line in self.lines if re.search(pattern, line)), 0.0)


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.005)


class Cell:
    """Roles by name: "scheduler", the workers "r0", "r1", ... and the gateways "g0", "g1", ... besides the one on this loop."""

    def __init__(self, config: Config, session: Session, client: aiohttp.ClientSession, port: int) -> None:
        self.config = config
        self.session = session
        self.client = client
        self.port = port
        self.roles: dict[str, Role] = {}
        self.worker_flags: tuple[str, ...] = ()
        self.ports: dict[str, int] = {}  # of gateways, each the same at every start
        self.prefixes: dict[str, tuple[str, ...]] = {}  # words before the command of a role

    def start(self, name: str) -> Role:
        """A fresh process of this name, where none runs."""
        config = self.config
        links = [f"--gateway-link={config.gateway_link}", f"--worker-link={config.worker_link}"]
        flags = [
            *links,
            f"--heartbeat-s={config.heartbeat_s}",
            f"--silence-s={config.silence_s}",
            f"--curve-dir={config.curve_dir}",
        ]
        if name == "scheduler":
            flags += [f"--hash-key-file={config.hash_key_file}", f"--metrics-port={config.metrics_port}"]
            flags += [f"--max-queued-requests={config.max_queued_requests}"]
            flags += [f"--resume-grace-s={config.resume_grace_s}"]
            self.roles[name] = Role("scheduler", *flags)
        elif name.startswith("g"):
            flags += [f"--model={config.model}", "--served-model-name=toy", f"--name={name}", f"--port={self.ports[name]}"]
            flags += [f"--resume-grace-s={config.resume_grace_s}", f"--api-key-file={config.api_key_file}"]
            self.roles[name] = Role("gateway", *flags)
        else:
            flags += [
                f"--name={name}",
                f"--model={config.model}",
                f"--vocabulary={VOCABULARY}",
                f"--max-num-batched-tokens={config.max_num_batched_tokens}",
            ]
            self.roles[name] = Role("tests.stub_worker", *flags, *self.worker_flags, prefix=self.prefixes.get(name, ()))
        return self.roles[name]

    async def kill(self, name: str) -> None:
        await asyncio.to_thread(self.roles.pop(name).kill)

    async def restart(self, name: str) -> None:
        await self.kill(name)
        self.start(name)

    async def ready(self) -> None:
        """The gateway on this loop can answer, and every other that runs."""
        await self.session.wait_ready(30)
        for name in self.ports:
            if name in self.roles:
                await self.ready_at(self.url(name))

    async def ready_at(self, url: str, timeout_s: float = 30.0) -> None:
        end = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with self.client.get(f"{url}/ready") as response:
                    if response.status == 200:
                        return
            assert time.monotonic() < end, f"{url} is not ready"
            await asyncio.sleep(0.02)

    def url(self, name: str = "") -> str:
        """Of a gateway; without a name: of the one on this loop."""
        return f"http://127.0.0.1:{self.ports[name] if name else self.port}"

    async def complete(self, body: dict[str, Any]) -> Answer:
        """The answer to a completion, streamed or whole; AssertionError when it is an error."""
        async with self.client.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            if body.get("stream"):
                events = parse_events(await response.text())
                assert events[-1] == "[DONE]" and not any("error" in event for event in events[:-1]), events[-2:]
                return Answer(200, response.headers, events=events)
            return Answer(200, response.headers, await response.json())

    def num_tokens(self) -> int:
        """Output tokens of everything that is under way."""
        return sum(len(sequence.output) for sequence in self.session.service._live.values())

    def most_tokens(self) -> int:
        """Output tokens of whoever is furthest."""
        return max((len(sequence.output) for sequence in self.session.service._live.values()), default=0)

    def fewest_tokens(self) -> int:
        """Output tokens of whoever is least far."""
        return min((len(sequence.output) for sequence in self.session.service._live.values()), default=0)

    async def metrics(self) -> dict[str, float]:
        """The scheduler's samples; labels in order: name{value,value}."""
        async with self.client.get(f"http://127.0.0.1:{self.config.metrics_port}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
            samples = [sample for family in families for sample in family.samples]
        return {each.name + (f"{{{','.join(each.labels.values())}}}" if each.labels else ""): each.value for each in samples}

    async def check_clean(self) -> dict[str, float]:
        """Nothing runs: no page is held, nobody waits, the books are in order. Returns the scheduler's metrics."""
        await until(lambda: not self.session.service.num_live and not self.session.runs)
        for _ in range(100):
            found = await self.metrics()
            held = sum(value for name, value in found.items() if name.startswith("quire_pages{") and name.endswith("held}"))
            if not held:
                break
            await asyncio.sleep(0.05)
        assert held == 0
        assert not any(value for name, value in found.items() if name.startswith("quire_queued_sequences"))
        for name in ("audit_violations", "internal_errors", "placement_false_credit_tokens"):
            assert found[f"quire_{name}_total"] == 0, name
        return found


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    *worker_flags: str,
    workers: int = 1,
    gateways: int = 0,
    prefixes: dict[str, tuple[str, ...]] | None = None,
    **settings: Any,
) -> AsyncIterator[Cell]:
    """A cell that is ready. Afterwards it must still answer, and hold nothing."""
    link, hub, metrics, *ports = free_ports(3 + gateways)
    own: dict[str, Any] = {
        "model": str(folder),
        "port": 0,
        "gateway_link": f"tcp://127.0.0.1:{link}",
        "worker_link": f"tcp://127.0.0.1:{hub}",
        "metrics_port": metrics,
        "hash_key_file": str(folder / "hash.key"),
        "heartbeat_s": 0.1,
        "silence_s": 1.0,
        "max_num_batched_tokens": 256,
    }
    config = Config(**(own | settings))
    async with Session(config, served_model.load(folder, "toy", model_folder.fingerprint(folder))) as session:
        runner = make_runner(create_app(session, config))
        await runner.setup()
        await web.TCPSite(runner, config.host, config.port).start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            cell = Cell(config, session, client, port)
            cell.worker_flags, cell.prefixes = worker_flags, prefixes or {}
            cell.ports = {f"g{number}": port for number, port in enumerate(ports)}
            try:
                for name in ("scheduler", *(f"r{number}" for number in range(workers)), *cell.ports):
                    cell.start(name)
                await cell.ready()
                scheduler = cell.roles["scheduler"]
                await until(lambda: sum("replica ready" in line for _, line in scheduler.lines) >= workers)
                yield cell
                await cell.check_clean()
            finally:
                for name in list(cell.roles):
                    await cell.kill(name)
                await runner.cleanup()

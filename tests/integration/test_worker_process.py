"""python -m gpu_worker beside a scripted scheduler on a real Hub: plans, faults, a second incarnation, drain, bad starts."""

import asyncio
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gpu_worker.loading import load
from gpu_worker.model.spec import read_spec
from gpu_worker.model.weights import Dummy, tensor_shapes
from quire.machine import free_ports
from shared.codec import Codec
from shared.columns import i32, read_i32
from shared.config import Config
from shared.messages import (
    PROTOCOL,
    WORKER_TO_SCHEDULER,
    Drain,
    Fault,
    Reset,
    StepDone,
    StepPlan,
    WorkerAlive,
    WorkerHello,
    WorkerWelcome,
)
from shared.model_folder import ModelError
from shared.probe import probe
from shared.sampling import Sampling
from shared.wire import Hub
from tests.plan_driver import make_plan
from tests.unit.worker.test_spec import LLAMA

pytestmark = pytest.mark.timeout(180)
ROOT = Path(__file__).resolve().parents[2]
HASH = bytes(range(16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "tokenizer.json").write_text("{}")
    spec = read_spec(LLAMA)
    source = Dummy(spec)
    save_file({name: source.get(name) for name in tensor_shapes(spec)}, folder / "model.safetensors")
    return folder


def command(folder: Path | str, *flags: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "gpu_worker",
        "--model",
        str(folder),
        "--device",
        "cpu",
        "--kv-cache-bytes",
        "4000000",
        *flags,
    ]


@dataclass
class Worker:
    """A worker process and the hub it is connected to."""

    hub: Hub
    process: asyncio.subprocess.Process
    metrics_port: int
    received: asyncio.Queue[tuple[str, Any]] = field(default_factory=asyncio.Queue)
    peer: str = ""

    async def next(self, kind: type) -> Any:
        """The next message that is no sign of life; it must be of this kind."""
        while True:
            self.peer, message = await asyncio.wait_for(self.received.get(), 60)
            if isinstance(message, kind):
                return message
            assert isinstance(message, WorkerAlive), message

    def send(self, message: Any) -> None:
        assert self.hub.send(self.peer, message)

    async def result(self, plan: StepPlan) -> StepDone:
        self.send(plan)
        done: StepDone = await self.next(StepDone)
        assert done.step == plan.step
        return done

    async def until_ready(self, wanted: str) -> None:
        """Until a probe of /ready says so (the first words: empty when the worker is ready)."""
        async with asyncio.timeout(60):
            while True:
                said = await asyncio.to_thread(probe, self.metrics_port, "/ready")
                if said.removeprefix("status 503: ").startswith(wanted) and bool(said) == bool(wanted):
                    return
                await asyncio.sleep(0.05)


class Inbox:
    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    def on_message(self, peer: str, message: Any) -> None:
        self.queue.put_nowait((peer, message))

    def on_gone(self, peer: str, reason: str) -> None:
        pass


@pytest.fixture
async def worker(folder: Path) -> AsyncIterator[Worker]:
    inbox = Inbox()
    (port,) = free_ports(1)
    hub = Hub("tcp://127.0.0.1:0", Codec(WORKER_TO_SCHEDULER), inbox, heartbeat_s=0.2, silence_s=5)
    beating = asyncio.create_task(hub.run())
    process = await asyncio.create_subprocess_exec(
        *command(folder, "--worker-link", hub.address, "--name", "r1", "--heartbeat-s", "0.2", "--metrics-port", str(port)),
        cwd=ROOT,
    )
    yield Worker(hub, process, port, inbox.queue)
    if process.returncode is None:
        process.kill()
        await process.wait()
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    hub.close()


def prefill(step: int, slot: int, tokens: list[int], page: int, **fields: Any) -> StepPlan:
    opens = i32([slot, 0]) + Sampling(temperature=0.0, num_prompt=len(tokens)).pack()
    columns = {"row_slots": i32([slot]), "row_lens": i32([len(tokens)]), "tokens": i32(tokens)}
    return make_plan(step, num_last=1, opens=opens, page_writes=i32([slot, 0, page]), **columns, **fields)


async def test_plans_faults_and_drain(worker: Worker) -> None:
    hello: WorkerHello = await worker.next(WorkerHello)
    assert (hello.protocol, hello.replica, hello.rank, hello.tp, hello.page_tokens) == (PROTOCOL, "r1", 0, 1, 16)
    assert hello.num_slots == 257 and hello.max_batched_tokens == 1024 and hello.inventory == b""
    worker.send(WorkerWelcome(1, 2, 1))

    # Two plans in flight: the second's input token is what the first sampled.
    worker.send(prefill(1, 1, [5, 6, 7], 9))
    worker.send(make_plan(2, num_decode=1, row_slots=i32([1]), registrations=i32([9]) + HASH))
    first = read_i32((await worker.next(StepDone)).tokens).tolist()
    second = read_i32((await worker.next(StepDone)).tokens).tolist()
    whole = await worker.result(prefill(3, 2, [5, 6, 7, *first], 10))
    assert read_i32(whole.tokens).tolist() == second

    # A plan that cannot be: Fault, then a new incarnation that still knows the acknowledged page, with empty slots.
    old_peer = worker.peer
    worker.send(make_plan(4, num_decode=1, row_slots=i32([999])))
    worker.send(make_plan(5, num_decode=1, row_slots=i32([1])))  # of the failed incarnation: never answered
    fault: Fault = await worker.next(Fault)
    assert fault.step == 4 and "999" in fault.text
    again: WorkerHello = await worker.next(WorkerHello)
    assert worker.peer != old_peer and again.inventory == i32([9]) + HASH
    worker.send(WorkerWelcome(1, 2, 1))
    repeated = await worker.result(prefill(1, 1, [5, 6, 7], 11))
    assert read_i32(repeated.tokens).tolist() == first
    await asyncio.wait_for(alive(worker), 60)

    worker.process.send_signal(signal.SIGTERM)
    assert isinstance(await worker.next(Drain), Drain)
    late = await worker.result(make_plan(2, num_decode=1, row_slots=i32([1])))  # what runs may finish
    assert read_i32(late.tokens).tolist() == second
    assert await asyncio.wait_for(worker.process.wait(), 60) == 0


async def test_it_is_ready_while_the_scheduler_gives_it_work(worker: Worker) -> None:
    await worker.next(WorkerHello)
    await worker.until_ready("the scheduler has not been reached yet")
    worker.send(WorkerWelcome(1, 2, 1))
    await worker.until_ready("")
    worker.send(Reset("who are you?", False))
    await worker.until_ready("lost the scheduler: who are you?")
    await worker.next(WorkerHello)
    worker.send(WorkerWelcome(2, 2, 1))
    await worker.until_ready("")
    assert await asyncio.to_thread(probe, worker.metrics_port, "/metrics") == ""


async def alive(worker: Worker) -> None:
    while True:
        _, message = await worker.received.get()
        if isinstance(message, WorkerAlive):
            assert 0 < message.memory_used_bytes < message.memory_total_bytes and 0 <= message.utilization <= 1
            return


async def test_a_scheduler_that_forgot_the_worker_gets_its_inventory(worker: Worker) -> None:
    await worker.next(WorkerHello)
    worker.send(WorkerWelcome(1, 2, 1))
    await worker.result(prefill(1, 1, list(range(1, 17)), 9, registrations=i32([9]) + HASH))
    old_peer = worker.peer
    worker.send(Reset("who are you?", False))
    again: WorkerHello = await worker.next(WorkerHello)
    assert worker.peer != old_peer and again.inventory == i32([9]) + HASH
    worker.send(WorkerWelcome(2, 2, 1))
    # The page is good: a sequence that starts behind it says what one that computes it says.
    sampling = Sampling(temperature=0.0, num_prompt=17).pack()
    warm = await worker.result(
        make_plan(1, num_last=1, opens=i32([3, 16]) + sampling, page_writes=i32([3, 0, 9, 3, 1, 12]),
                  row_slots=i32([3]), row_lens=i32([1]), tokens=i32([50]))
    )  # fmt: skip
    cold = await worker.result(
        make_plan(2, num_last=1, opens=i32([4, 0]) + sampling, page_writes=i32([4, 0, 13, 4, 1, 14]),
                  row_slots=i32([4]), row_lens=i32([17]), tokens=i32([*range(1, 17), 50]))
    )  # fmt: skip
    assert warm.tokens == cold.tokens


async def test_a_final_refusal_ends_the_worker_with_the_reason(worker: Worker) -> None:
    await worker.next(WorkerHello)
    worker.send(Reset("model 123 is not 456", True))
    assert await asyncio.wait_for(worker.process.wait(), 60) == 2


async def test_sigterm_without_a_scheduler_ends_at_once(folder: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *command(folder, "--worker-link", "tcp://127.0.0.1:9"), cwd=ROOT, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    while b"memory plan" not in await asyncio.wait_for(process.stderr.readline(), 60):
        pass
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 60) == 0


def broken(folder: Path, target: Path, change: str) -> Path:
    """A copy of the model folder with one thing wrong."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    weights = target / "model.safetensors"
    match change:
        case "architecture":
            (target / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
        case "truncated":
            os.truncate(weights, weights.stat().st_size // 2)
        case "header":
            weights.write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
        case "no weights":
            weights.unlink()
        case "not json":
            (target / "config.json").write_text("{")
        case "shape":
            (target / "config.json").write_text(json.dumps(config | {"intermediate_size": 97}))
    return target


@pytest.mark.parametrize(("change", "words"), [
    ("architecture", ["MambaForCausalLM", "supported"]),
    ("truncated", ["model.safetensors", "damaged"]),
    ("header", ["model.safetensors", "damaged"]),
    ("no weights", ["holds no weights"]),
    ("not json", ["config.json", "cannot be read"]),
    ("shape", ["shape", "97"]),
])  # fmt: skip
def test_bad_models_are_refused_in_one_line(folder: Path, tmp_path: Path, change: str, words: list[str]) -> None:
    with pytest.raises(ModelError) as refused:
        load(Config(model=str(broken(folder, tmp_path / "model", change)), device="cpu", kv_cache_bytes=4_000_000))
    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(("flags", "words"), [
    (["--kv-cache-bytes", "1000"], ["less than one request", "1,000"]),
    (["--model", "/nowhere/at/all"], ["/nowhere/at/all"]),
    (["--dtype", "float16"], ["float16", "bfloat16 or float32"]),
])  # fmt: skip
def test_a_refused_start_ends_with_one_line_and_2(folder: Path, flags: list[str], words: list[str]) -> None:
    ended = subprocess.run(command(folder, *flags), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("gpu_worker: error: ") and "Traceback" not in ended.stderr
    for word in words:
        assert word in last


def test_random_weights_need_no_weight_file(folder: Path, tmp_path: Path) -> None:
    target = broken(folder, tmp_path / "model", "no weights")
    loaded = load(Config(model=str(target), device="cpu", dummy_weights=True, kv_cache_bytes=4_000_000))
    assert torch.equal(loaded.runner.decoder.embedding.weight, Dummy(read_spec(LLAMA)).get("model.embed_tokens.weight"))

"""A worker without a device on the real link: scripted or hashed tokens, a delay per step, and ways to misbehave.

    python -m tests.stub_worker --worker-link tcp://127.0.0.1:5712 --name r0 --script 5,6,7 --delay-s 0.01

In a test: async with running(StubWorker(config, script=[5, 6, 7])) as worker: ...
Output token i of every sequence is script[i % len(script)]; a function of (prompt, i) may be given instead. Without a script
the tokens are hashes of everything the sequence attends to (tests.sim.fake_worker), so any mix-up changes the text.
"""

import argparse
import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared import keys, model_folder
from shared.codec import Codec
from shared.config import Config, add_flags, load
from shared.messages import SCHEDULER_TO_WORKER, Drain, Fault, StepDone, StepPlan, WorkerAlive, WorkerHello, WorkerWelcome
from shared.wire import Link
from tests.sim.fake_worker import FakeWorker

Script = Callable[[list[int], int], int]  # (prompt, output index) -> token


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Steps are counted from 1 over the life of the process; 0: never."""

    crash_at_step: int = 0  # the process ends at once
    freeze_at_step: int = 0  # its result never comes, heartbeats go on
    fault_at_step: int = 0
    crash_on_token: int = -1  # the process ends when a row's input holds this token
    fault_on_token: int = -1


class ScriptedWorker(FakeWorker):
    """FakeWorker whose sampled tokens come from a script, or are hashes modulo vocabulary."""

    def __init__(self, *args: Any, script: Script | None, vocabulary: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._script = script
        self._vocabulary = vocabulary

    def _sample(self, slot: int, prefix: int) -> int:
        token = super()._sample(slot, prefix)
        sampling, position = self.samplings[slot], self.lengths[slot]
        if self._script is not None:
            known = self.known(slot)
            token = self._script(known[: sampling.num_prompt], position - sampling.num_prompt)
        elif token >= 0 and self._vocabulary:
            token = abs(hash((token, prefix, position))) % self._vocabulary
        self.lasts[slot] = token
        self.histories[slot][position] = token
        return token


def repeat(ids: Sequence[int]) -> Script:
    return lambda prompt, index: ids[index % len(ids)]


class StubWorker:
    """Must be created inside a running loop."""

    def __init__(
        self,
        config: Config,
        *,
        script: Sequence[int] | Script | None = None,
        vocabulary: int = 0,
        delay_s: float = 0.0,
        num_pages: int = 1025,
        num_slots: int = 257,
        max_model_len: int = 4096,
        model: str = "stub",
        trouble: Trouble | None = None,
    ) -> None:
        """vocabulary: hashed tokens are below it; 0: below tests.sim.fake_worker.VOCABULARY."""
        self._delay_s = delay_s
        self._model = model
        self._trouble = trouble or Trouble()
        self.num_steps = 0
        self._working = False
        self._draining = False
        self._faulted = False  # until the welcome, plans are those the scheduler sent before it knew
        self.welcomes: list[WorkerWelcome] = []
        self.lost: list[str] = []
        self.drained = asyncio.Event()
        self._plans: asyncio.Queue[StepPlan] = asyncio.Queue()
        self.device = ScriptedWorker(
            config.name or f"stub-{os.getpid()}",
            page_tokens=config.block_size,
            num_pages=num_pages,
            num_slots=num_slots,
            max_batched=config.max_num_batched_tokens or 2048,
            max_len=config.max_model_len or max_model_len,
            script=repeat(script) if isinstance(script, Sequence) else script,
            vocabulary=vocabulary,
        )
        codec = Codec(SCHEDULER_TO_WORKER)
        beat_s, silence_s = config.heartbeat_s, config.silence_s
        name, key = f"w/{self.device.replica}/0", keys.link_keys(config.curve_dir, keys.WORKER)
        self.link = Link(config.worker_link, name, codec, self, heartbeat_s=beat_s, silence_s=silence_s, keys=key)

    # --- LinkHandler ------------------------------------------------------------------------------------------------------

    def hello(self) -> WorkerHello:
        return self.device.hello(self._model)

    def on_message(self, message: StepPlan | WorkerWelcome | Drain) -> None:
        match message:
            case StepPlan():
                if not self._faulted:
                    self._plans.put_nowait(message)
            case WorkerWelcome():
                self.welcomes.append(message)
                self._faulted = False
            case Drain():
                self.drained.set()

    def on_lost(self, reason: str, fatal: bool) -> None:
        self.lost.append(reason)
        if self._draining:
            self.drained.set()
        while not self._plans.empty():  # nothing of the old incarnation is wanted any more
            self._plans.get_nowait()

    # --- work -------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled, or refused for good."""
        work = asyncio.create_task(self._work())
        alive = asyncio.create_task(self._alive())
        try:
            await self.link.run()
        finally:
            work.cancel()
            alive.cancel()

    @property
    def num_left(self) -> int:
        """Plans without a result."""
        return self._plans.qsize() + self._working

    def drain(self, reason: str) -> None:
        self._draining = True
        if not self.link.send(Drain(reason)):
            self.drained.set()

    async def _alive(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.link.send(WorkerAlive(self.device.last_step, 0, 0, 0.0))

    async def _work(self) -> None:
        while True:
            plan = await self._plans.get()
            self._working = True
            incarnation = len(self.lost)
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            result = self._execute(plan) if incarnation == len(self.lost) else None
            if result is not None:
                self.link.send(result)
            self._working = False

    def _execute(self, plan: StepPlan) -> StepDone | Fault | None:
        trouble = self._trouble
        self.num_steps += 1
        tokens = memoryview(plan.tokens).cast("i").tolist()
        if self.num_steps == trouble.crash_at_step or trouble.crash_on_token in tokens:
            os._exit(9)
        if self.num_steps == trouble.freeze_at_step:
            return None
        self.device.inbox.append(plan)
        if self.num_steps == trouble.fault_at_step or trouble.fault_on_token in tokens:
            step = self.device.fail(0.5)
            self.link.send(Fault(step, "stub fault"))
            self._faulted = True
            while not self._plans.empty():
                self._plans.get_nowait()
            self.link.send(self.hello())
            return None
        return self.device.run()


@contextlib.asynccontextmanager
async def running(worker: StubWorker) -> AsyncIterator[StubWorker]:
    """The worker runs on this loop until the block is left, which looks to the scheduler like its sudden death."""
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _main(config: Config, parsed: argparse.Namespace) -> None:
    script = [int(token) for token in parsed.script.split(",")] if parsed.script else None
    trouble = Trouble(
        crash_at_step=parsed.crash_at_step,
        freeze_at_step=parsed.freeze_at_step,
        fault_at_step=parsed.fault_at_step,
        crash_on_token=parsed.crash_on_token,
        fault_on_token=parsed.fault_on_token,
    )
    worker = StubWorker(
        config,
        script=script,
        vocabulary=parsed.vocabulary,
        delay_s=parsed.delay_s,
        num_pages=parsed.num_pages,
        num_slots=config.max_num_seqs + 1,
        model=model_folder.fingerprint(Path(config.model)) if config.model else "stub",
        trouble=trouble,
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, worker.drain, "signal SIGTERM")
    run = asyncio.create_task(worker.run())
    await asyncio.wait({run, asyncio.create_task(worker.drained.wait())}, return_when=asyncio.FIRST_COMPLETED)
    while worker.num_left and not run.done():  # noqa: ASYNC110  (plans sent before the scheduler heard of the drain)
        await asyncio.sleep(0.01)
    run.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description="A worker without a device.")
    add_flags(parser)
    parser.add_argument("--script", default="", help="output ids, separated by commas and repeated; empty: hashes")
    parser.add_argument("--vocabulary", type=int, default=0)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--num-pages", type=int, default=1025)
    for field in ("crash_at_step", "freeze_at_step", "fault_at_step"):
        parser.add_argument("--" + field.replace("_", "-"), type=int, default=0)
    for field in ("crash_on_token", "fault_on_token"):
        parser.add_argument("--" + field.replace("_", "-"), type=int, default=-1)
    parsed = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(load(parsed), parsed))


if __name__ == "__main__":
    main()

"""The two threads of a worker: launch (plan -> device, in order) and completion (waits, packs StepDone).

Both speak to the asyncio thread through callbacks on its loop. A plan carries the incarnation it arrived in; when that
number changes, older plans are skipped and the slots start empty, while weights and pages stay.
"""

import asyncio
import queue
import threading
import time
import traceback
from typing import NamedTuple, Protocol

from gpu_worker.prepare import BadPlan
from gpu_worker.runner import Runner, Step
from shared.messages import StepDone, StepPlan

FAULT_TEXT_CHARS = 4000
IDLE_S = 0.5  # without a plan for this long the launch thread may do other work


class StepHandler(Protocol):
    """Called on the asyncio loop."""

    def on_done(self, incarnation: int, done: StepDone) -> None: ...

    def on_fault(self, incarnation: int, step: int, text: str, *, refused: bool) -> None:
        """refused: the plan contradicts the slots, and nothing was computed."""


class _Plan(NamedTuple):
    incarnation: int
    plan: StepPlan


class _Launched(NamedTuple):
    incarnation: int
    step: Step


class Steps:
    def __init__(self, runner: Runner, handler: StepHandler, loop: asyncio.AbstractEventLoop) -> None:
        self._runner = runner
        self._handler = handler
        self._loop = loop
        self._plans: queue.SimpleQueue[_Plan | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[_Launched | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._launch_all, name="launch", daemon=True),
            threading.Thread(target=self._complete_all, name="completion", daemon=True),
        ]
        self._lock = threading.Lock()
        self._failed = 0  # incarnation that had a fault: the rest of it is skipped
        self.busy_s = 0.0  # seconds spent on steps so far
        self._outstanding = 0  # steps that are being launched or computed
        self._progress_at = 0.0  # when the last of them began or ended

    @property
    def stuck_s(self) -> float:
        """Seconds without progress while there is a step to compute."""
        return time.monotonic() - self._progress_at if self._outstanding else 0.0

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, incarnation: int, plan: StepPlan) -> None:
        self._plans.put(_Plan(incarnation, plan))

    def stop(self) -> None:
        """End both threads after the plans that were put."""
        self._plans.put(None)
        for thread in self._threads:
            thread.join(timeout=10)

    def _launch_all(self) -> None:
        current = 0
        while (item := self._next_plan()) is not None:
            if item.incarnation == self._failed:
                continue
            if item.incarnation != current:
                current = item.incarnation
                self._runner.reset()
            started = time.perf_counter()
            self._count(1)
            try:
                step = self._runner.launch(item.plan)
            except Exception as error:  # whatever a plan or a device can raise: the scheduler hears of it, the worker goes on
                self._fail(item.incarnation, item.plan.step, error)
            else:
                self._launched.put(_Launched(current, step))
            self.busy_s += time.perf_counter() - started
        self._launched.put(None)

    def _next_plan(self) -> _Plan | None:
        """Waits; meanwhile the runner may prepare what it puts off."""
        while True:
            try:
                return self._plans.get(timeout=IDLE_S)
            except queue.Empty:
                if not self._runner.idle():
                    return self._plans.get()

    def _complete_all(self) -> None:
        while (item := self._launched.get()) is not None:
            try:
                done = self._runner.collect(item.step)
            except Exception as error:
                self._fail(item.incarnation, item.step.number, error)
            else:
                self._count(-1)
                self._loop.call_soon_threadsafe(self._handler.on_done, item.incarnation, done)

    def _fail(self, incarnation: int, step: int, error: Exception) -> None:
        self._failed = incarnation
        self._count(-1)
        text = traceback.format_exc()[-FAULT_TEXT_CHARS:]
        refused = isinstance(error, BadPlan)
        self._loop.call_soon_threadsafe(lambda: self._handler.on_fault(incarnation, step, text, refused=refused))

    def _count(self, change: int) -> None:
        with self._lock:
            self._outstanding += change
            self._progress_at = time.monotonic()

"""Keeps the ranks of a group in step: every rank launches the same plans in the same order, whatever happens to their links.

A collective waits for all ranks, so a plan that reached only some of them would hold those for ever. A turn is what one Welcome
begins: the plans until the replica is dropped. Nothing of a turn is launched before all ranks have joined it or before what
some ranks lacked of the turn before has been handed to them; then all of them have launched the same plans.
Whether a turn was joined is decided once, in the store, also for a rank whose link breaks meanwhile.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from gpu_worker.parallel.group import Group, leave
from shared.codec import Codec, encode
from shared.messages import SCHEDULER_TO_WORKER, StepPlan

KEPT_PLANS = 64  # more than may be in flight
HAND_OVER_S = 20.0  # for a plan that another rank has
POLL_S = 0.002
JOINED, GIVEN_UP = "joined", "given up"


class _Welcome(NamedTuple):
    incarnation: int
    turn: str


class _Plan(NamedTuple):
    incarnation: int
    plan: StepPlan


class Turns:
    """All methods but those of the thread are called on the asyncio loop. launch: takes (incarnation, plan), in order."""

    def __init__(self, group: Group, launch: Callable[[int, StepPlan], None]) -> None:
        self._group = group
        self._launch = launch
        self._store = group.store(HAND_OVER_S)
        self._codec = Codec(SCHEDULER_TO_WORKER)
        self._items: queue.SimpleQueue[_Welcome | _Plan | None] = queue.SimpleQueue()
        self._ended = 0  # the last incarnation that is over
        # Of the last turn that was joined:
        self._incarnation = 0
        self._received = 0
        self._recent: deque[StepPlan] = deque(maxlen=KEPT_PLANS)
        self._thread = threading.Thread(target=self._run, name="turns", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def welcome(self, incarnation: int, turn: str) -> None:
        """turn: the same text for all ranks, and never used before."""
        self._items.put(_Welcome(incarnation, turn))

    def put(self, incarnation: int, plan: StepPlan) -> None:
        self._items.put(_Plan(incarnation, plan))

    def lost(self, incarnation: int) -> None:
        """No plan of this incarnation follows."""
        self._ended = incarnation

    def stop(self) -> None:
        """After everything that was put."""
        self._items.put(None)
        self._thread.join(timeout=HAND_OVER_S)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (item := self._items.get()) is not None:
                if isinstance(item, _Welcome):
                    self._join(item)
                elif item.incarnation == self._incarnation:  # else its turn was given up
                    self._received += 1
                    self._recent.append(item.plan)
                    self._launch(item.incarnation, item.plan)
        except Exception as error:  # the store is gone, or another rank has not done its part
            leave(f"rank {self._group.rank} cannot keep in step with the others: {str(error).splitlines()[0]}")

    def _join(self, welcome: _Welcome) -> None:
        store, key = self._store, f"turn/{welcome.turn}"
        store.set(f"{key}/{self._group.rank}", str(self._received))
        if store.add(f"{key}/arrived", 1) == self._group.size:
            store.compare_set(f"{key}/state", "", JOINED)
        while not store.check([f"{key}/state"]):
            if self._ended >= welcome.incarnation:
                store.compare_set(f"{key}/state", "", GIVEN_UP)
            time.sleep(POLL_S)
        if store.get(f"{key}/state") != JOINED.encode():
            return
        self._even_out(key, [int(store.get(f"{key}/{rank}")) for rank in range(self._group.size)])
        self._incarnation, self._received = welcome.incarnation, 0
        self._recent.clear()

    def _even_out(self, key: str, counts: list[int]) -> None:
        """Whoever has received most hands on what others lack; they launch it under the turn that it belongs to."""
        most, least = max(counts), min(counts)
        if most - least > KEPT_PLANS:
            raise RuntimeError(f"ranks are {most - least} plans apart")
        if self._received == most:
            for number in range(least, most):
                self._store.set(f"{key}/plan/{number}", encode(self._recent[number - most]).hex())
        for number in range(self._received, most):
            plan: StepPlan = self._codec.decode(bytes.fromhex(self._store.get(f"{key}/plan/{number}").decode()))
            self._launch(self._incarnation, plan)

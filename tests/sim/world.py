"""A whole cell in one process: the real core, fake workers and gateways, random events, every token checked.

One seed is one history. Messages cross the real codec. check_end() holds the invariants of a finished history.
"""

import math
import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from scheduler import audit
from scheduler.cell import Cell
from scheduler.core import Core
from shared.codec import Codec, encode
from shared.columns import i32, i64
from shared.messages import (
    GATEWAY_TO_SCHEDULER,
    PROTOCOL,
    SCHEDULER_TO_GATEWAY,
    SCHEDULER_TO_WORKER,
    WORKER_TO_SCHEDULER,
    Abort,
    Drain,
    Fault,
    Finish,
    GatewayHello,
    Reset,
    StepPlan,
    Submit,
    WorkerWelcome,
)
from shared.pages import page_hashes, root_hash
from shared.sampling import Edit, Flag, Sampling, pack_edits
from tests.sim.fake_worker import VOCABULARY, FakeWorker
from tests.sim.streams import Gateway, Stream, require

KEY = b"k" * 32
FROM_GATEWAY, FROM_WORKER = Codec(GATEWAY_TO_SCHEDULER), Codec(WORKER_TO_SCHEDULER)
TO_GATEWAY, TO_WORKER = Codec(SCHEDULER_TO_GATEWAY), Codec(SCHEDULER_TO_WORKER)


@dataclass(slots=True)
class Shape:
    """Sizes of one history."""

    page_tokens: int = 4
    num_pages: int = 49
    num_slots: int = 9
    max_batched: int = 24
    max_len: int = 96
    num_replicas: int = 2
    num_gateways: int = 2
    credits: int = 2
    num_streams: int = 36
    max_new: int = 24
    prompt_len: int = 34
    calm: bool = False  # no deaths, faults, drains and restarts


def random_shape(random_: random.Random) -> Shape:
    page_tokens = random_.choice((1, 2, 4, 4, 16))
    return Shape(
        page_tokens=page_tokens,
        num_pages=1 + max(random_.choice((80, 130, 200)) // page_tokens, 3),
        num_slots=random_.choice((3, 9, 12)),
        max_batched=random_.choice((12, 24, 64)),
        max_len=random_.choice((60, 96)),
        num_replicas=random_.choice((1, 2, 3)),
        num_gateways=random_.choice((1, 2)),
        credits=random_.choice((1, 2, 2, 3)),
        num_streams=random_.randrange(12, 30),
        calm=random_.random() < 0.3,
    )


class World:
    def __init__(self, seed: int, shape: Shape | None = None) -> None:
        self.random = random.Random(seed)
        self.shape = shape or random_shape(self.random)
        self.now = 1000.0
        self.nonce = 0
        self.next_id = 0
        self.last_steps: dict[str, int] = {}
        self.workers: dict[str, FakeWorker] = {}  # by peer
        self.to_scheduler: dict[str, deque[Any]] = {}  # results on their way, by worker peer
        self.gateways: list[Gateway] = []
        self.salts = ["", "", "tenant"]
        self.bases = [
            [self.random.randrange(VOCABULARY) for _ in range(self.random.randrange(8, self.shape.prompt_len))]
            for _ in range(4)
        ]
        self.counts: dict[str, int] = {}
        self._new_core()
        for number in range(self.shape.num_gateways):
            self._join_gateway(Gateway(f"g{number}", ""))
        for number in range(self.shape.num_replicas):
            self._join_worker(self._fresh_worker(f"r{number}"))

    # --- actors -----------------------------------------------------------------------------------------------------------

    def _new_core(self) -> None:
        cell = Cell(
            page_tokens=self.shape.page_tokens,
            hash_key=KEY,
            epoch=int(self.now),
            credits=self.shape.credits,
            max_queued=1000,
            step_timeout_s=1e9,
        )
        self.core = Core(cell)

    def _peer(self, prefix: str) -> str:
        self.nonce += 1
        return f"{prefix}/{self.nonce}"

    def _fresh_worker(self, replica: str) -> FakeWorker:
        shape = self.shape
        return FakeWorker(
            replica,
            page_tokens=shape.page_tokens,
            num_pages=shape.num_pages,
            num_slots=shape.num_slots,
            max_batched=shape.max_batched,
            max_len=shape.max_len,
        )

    def _join_worker(self, worker: FakeWorker) -> None:
        peer = self._peer(f"w/{worker.replica}/0")
        self.workers[peer] = worker
        self.to_scheduler[peer] = deque()
        self._from_worker(peer, worker.hello())

    def _join_gateway(self, gateway: Gateway) -> None:
        gateway.peer = self._peer(f"g/{gateway.name}")
        gateway.arrived.clear()
        if gateway not in self.gateways:
            self.gateways.append(gateway)
        self._from_gateway(gateway, GatewayHello(PROTOCOL, gateway.name, "m"))
        for number in gateway.live:  # what is still wanted is submitted again, with what was delivered
            if gateway.streams[number].aborted:
                gateway.streams[number].end = Finish.ABORT
            else:
                self._submit(gateway, number)

    # --- messages ---------------------------------------------------------------------------------------------------------

    def _from_gateway(self, gateway: Gateway, message: tuple[Any, ...]) -> None:
        self._send(self.core.on_gateway(gateway.peer, FROM_GATEWAY.decode(encode(message)), self.now))

    def _from_worker(self, peer: str, message: tuple[Any, ...]) -> None:
        self._send(self.core.on_worker(peer, FROM_WORKER.decode(encode(message)), self.now))

    def _send(self, out: list[tuple[str, Any]]) -> None:
        for peer, message in out:
            frame = encode(message)
            if peer.startswith("w/"):
                self._to_worker(peer, TO_WORKER.decode(frame))
            else:
                for gateway in self.gateways:
                    if gateway.peer == peer:
                        gateway.arrived.append(TO_GATEWAY.decode(frame))

    def _to_worker(self, peer: str, message: Any) -> None:
        worker = self.workers.get(peer)
        if worker is None:
            return
        match message:
            case StepPlan():
                worker.inbox.append(message)
                flying = len(worker.inbox) + len(self.to_scheduler[peer])
                require(flying <= self.shape.credits, f"{flying} plans in flight, {self.shape.credits} credits")
            case Reset():
                require(not message.fatal, message.reason)
                self._lose_link(peer)
            case WorkerWelcome(credits=credits):
                require(credits == self.shape.credits, f"{credits = }")

    def _lose_link(self, peer: str) -> None:
        """The worker starts a new incarnation; plans it has not begun are forgotten, results not delivered are lost."""
        worker = self.workers.pop(peer)
        del self.to_scheduler[peer]
        if worker.inbox and self.random.random() < 0.5:
            worker.run()
        worker.inbox.clear()
        self._join_worker(worker)

    # --- events -----------------------------------------------------------------------------------------------------------

    def new_stream(self) -> Stream:
        random_ = self.random
        base = random_.choice(self.bases)
        prompt = base[: random_.randrange(1, len(base) + 1)] + [
            random_.randrange(VOCABULARY) for _ in range(random_.choice((0, 0, 1, 3, 9)))
        ]
        if random_.random() < 0.25:  # one of few that end with a page, so that all of it is found in the cache
            prompt = base[: max(len(base) // self.shape.page_tokens, 1) * self.shape.page_tokens]
        min_new = random_.choice((0, 0, 0, 3))
        edits = [Edit(1, 1.5, min_new)] if min_new else []
        if random_.random() < 0.03:
            edits.append(Edit(0, -math.inf, random_.choice((1, 6))))
        if random_.random() < 0.2:
            edits.append(Edit(random_.randrange(1, 9), 0.5))
        sampling = Sampling(
            seed=random_.randrange(3),
            num_prompt=len(prompt),
            flags=Flag.NEEDS_HISTORY if random_.random() < 0.3 else 0,
            logprobs=random_.choice((-1, -1, -1, 0, 2)),
            score_width=random_.choice((-1,) * 8 + (0, 2)),
        )
        return Stream(
            prompt=prompt,
            max_new=random_.randrange(0 if sampling.score_width >= 0 else 1, self.shape.max_new),
            min_new=min_new,
            stop_ids=random_.choice(([], [0], [0, 5])),
            sampling=sampling,
            edits=edits,
            salt=random_.choice(self.salts),
            priority=random_.choice((0, 0, 0, -1, 5)),
        )

    def submit_new(self) -> None:
        self.next_id += 1
        gateway = self.random.choice(self.gateways)
        gateway.streams[self.next_id] = self.new_stream()
        self._submit(gateway, self.next_id)

    def _submit(self, gateway: Gateway, number: int) -> None:
        stream = gateway.streams[number]
        stream.started = 0
        if not stream.output:
            stream.scores.clear()
        root = root_hash(KEY, stream.salt)
        tokens = i32(stream.prompt + stream.output)
        submit = Submit(
            number,
            tokens,
            len(stream.prompt),
            stream.max_new,
            stream.min_new,
            i32(stream.stop_ids),
            stream.sampling.pack(),
            pack_edits(stream.edits),
            root,
            page_hashes(KEY, root, tokens, self.shape.page_tokens),
            stream.priority,
            stream.salt,
            0.0,
            0.0,
            weight=self.random.choice((1, 3)),
        )
        self._from_gateway(gateway, submit)

    def abort(self) -> None:
        gateway = self.random.choice(self.gateways)
        if gateway.streams:
            number = self.random.choice(list(gateway.streams))
            gateway.streams[number].aborted = True
            self._from_gateway(gateway, Abort(i64([number, 10**9]), "test"))

    def execute(self) -> None:
        """A worker with plans does the oldest; its result travels."""
        busy = [peer for peer, worker in self.workers.items() if worker.inbox]
        if busy:
            peer = self.random.choice(busy)
            self.to_scheduler[peer].append(self.workers[peer].run())

    def deliver(self) -> None:
        waiting = [peer for peer, results in self.to_scheduler.items() if results]
        if waiting:
            peer = self.random.choice(waiting)
            self._from_worker(peer, self.to_scheduler[peer].popleft())

    def trouble(self) -> None:
        """Something dies, fails, leaves or restarts."""
        kind = self.random.choice(("death", "link", "fault", "drain", "gateway", "gateway link", "scheduler"))
        self.counts[kind] = self.counts.get(kind, 0) + 1
        peer = self.random.choice(list(self.workers))
        worker = self.workers[peer]
        match kind:
            case "death":
                del self.workers[peer], self.to_scheduler[peer]
                self._send(self.core.on_gone(peer, "died", self.now))
                self._join_worker(self._fresh_worker(worker.replica))
            case "link":
                self._send(self.core.on_gone(peer, "silent", self.now))
                self._lose_link(peer)
            case "fault":
                self._fault(peer, worker)
            case "drain":
                self._drain(peer, worker)
            case "gateway":
                gateway = self.random.choice(self.gateways)
                self._send(self.core.on_gone(gateway.peer, "died", self.now))
                for number in gateway.live:
                    gateway.streams[number].end = Finish.ABORT
                self._join_gateway(gateway)
            case "gateway link":
                gateway = self.random.choice(self.gateways)
                gone = gateway.peer
                self._join_gateway(gateway)
                self._send(self.core.on_gone(gone, "silent", self.now))
            case "scheduler":
                self._restart_scheduler()

    def _fault(self, peer: str, worker: FakeWorker) -> None:
        if not worker.inbox:
            return
        while self.to_scheduler[peer]:  # results before the fault arrive before it
            self._from_worker(peer, self.to_scheduler[peer].popleft())
        if peer in self.workers and worker.inbox:
            step = worker.fail(self.random.random())
            self._from_worker(peer, Fault(step, "test"))
            self._from_worker(peer, worker.hello())

    def _drain(self, peer: str, worker: FakeWorker) -> None:
        self._from_worker(peer, Drain("rolling update"))
        self._send(self.core.pump(self.now))
        require(not self.core.cell.replicas[worker.replica].running, "a draining worker still has sequences")
        while worker.inbox:
            self.to_scheduler[peer].append(worker.run())
        while self.to_scheduler[peer]:
            self._from_worker(peer, self.to_scheduler[peer].popleft())
        del self.workers[peer], self.to_scheduler[peer]
        self._send(self.core.on_gone(peer, "left", self.now))
        self._join_worker(self._fresh_worker(worker.replica))

    def _restart_scheduler(self) -> None:
        self._new_core()
        for peer in list(self.workers):
            self._lose_link(peer)
        for gateway in self.gateways:
            if self.random.random() < 0.5:
                gateway.read()
            self._join_gateway(gateway)

    # --- a history --------------------------------------------------------------------------------------------------------

    def step(self, todo: int) -> int:
        """One event; returns how many streams are still to come."""
        chance = self.random.random()
        if todo and chance < 0.2:
            self.submit_new()
            todo -= 1
        elif chance < 0.207:
            self.abort()
        elif chance < 0.217 and not self.shape.calm:
            self.trouble()
        elif chance < 0.60:
            self.execute()
        elif chance < 0.95:
            self.deliver()
        else:
            self._send(self.core.tick(self.now))
        self.now += self.random.random() * 0.02
        if self.random.random() < 0.85:
            self._send(self.core.pump(self.now))
        for gateway in self.gateways:
            gateway.read()
        return todo

    def run(self) -> "World":
        todo = self.shape.num_streams
        events = 0
        while todo or any(gateway.live for gateway in self.gateways):
            todo = self.step(todo)
            events += 1
            require(events < 60_000, f"stuck: {[gateway.live for gateway in self.gateways]}")
        self.finish()
        return self

    def finish(self) -> None:
        """Let every plan in flight end, then check."""
        for _ in range(10_000):
            if not any(worker.inbox for worker in self.workers.values()) and not any(self.to_scheduler.values()):
                break
            self.execute()
            self.deliver()
            self._send(self.core.pump(self.now))
        self._send(self.core.tick(self.now))
        self.check_end()

    def check_end(self) -> None:
        cell = self.core.cell
        for replica in cell.replicas.values():
            found = audit.violations(replica)
            require(not found, f"audit of {replica.name}: {found}")
            require(not replica.running and not replica.in_flight and not replica.pool.held, f"{replica.name} is not empty")
        require(not len(cell.waiting), "sequences wait for ever")
        cell.accounts.forget_idle()
        require(not cell.accounts.num_accounts, "an account without sequences is kept")
        require(cell.counters.audit_violations == 0, "audit violations")
        require(cell.counters.false_credit_tokens == 0, "false credit")
        limit = min(self.shape.max_len, (self.shape.num_pages - 1) * self.shape.page_tokens)
        failures = sum(self.counts.get(kind, 0) for kind in ("fault", "death", "link"))
        for gateway in self.gateways:
            for number, stream in gateway.streams.items():
                gateway.check(number, stream, limit, failures)

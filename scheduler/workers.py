"""Which workers there are: ranks gather into replicas, replicas come, leave and fail."""

import logging
from typing import NamedTuple

from scheduler.cell import Cell
from scheduler.commit import Out
from scheduler.replica import Replica
from scheduler.sequence import Sequence
from shared.messages import PROTOCOL, Drain, Reset, WorkerHello, WorkerWelcome

log = logging.getLogger("quire.scheduler")

_REGISTRATION_BYTES = 20
# What a worker may claim to have: the scheduler sets aside memory for its pages and slots.
LIMITS = {"num_pages": (2, 2**24), "num_slots": (2, 2**16), "max_batched_tokens": (1, 2**24), "max_model_len": (1, 2**28)}
MOST_RANKS = 1024
REMEMBERED_PAGES = 2**20  # of dropped replicas that may come back under their name; the oldest are forgotten first
REMEMBERED_REPLICAS = 64


def _inventory(hello: WorkerHello) -> dict[int, bytes]:
    column = hello.inventory
    entries = (column[at : at + _REGISTRATION_BYTES] for at in range(0, len(column), _REGISTRATION_BYTES))
    return {int.from_bytes(entry[:4], "little", signed=True): entry[4:] for entry in entries}


def _folder(model: str) -> str:
    """The model folder's part of a fingerprint; a worker may add words about how it computes."""
    return model.partition(" ")[0]


class _Dropped(NamedTuple):
    """What is remembered of a replica that may come back under its name."""

    certain: dict[int, bytes]  # what its pages held for certain: bounds the inventory it may come back with
    processes: list[int]  # of its ranks, where it was gone without a word; else empty
    struck: list[Sequence]  # whom its end was blamed on


class Workers:
    """Peers of the worker link. A replica exists while all of its ranks are here."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._hellos: dict[str, WorkerHello] = {}  # by peer: everybody who said hello and was not told to go
        self._turn = 0  # replicas that have begun
        self._faulted: set[str] = set()  # reported a fault and will say hello again
        self._dropped: dict[str, _Dropped] = {}  # by replica

    @property
    def peers(self) -> list[str]:
        return list(self._hellos)

    def replica_of(self, peer: str) -> Replica | None:
        hello = self._hellos.get(peer)
        replica = self._cell.replicas.get(hello.replica) if hello is not None else None
        return replica if replica is not None and peer in replica.peers else None

    def on_stranger(self, peer: str) -> list[Out]:
        if peer in self._faulted or peer in self._hellos:  # on its way back, or waiting for its other ranks
            return []
        return [(peer, Reset("say hello first", False))]

    def on_hello(self, peer: str, hello: WorkerHello, now: float) -> list[Out]:
        self._faulted.discard(peer)
        out: list[Out] = []
        for other, known in list(self._hellos.items()):  # an earlier incarnation of this rank, or ranks of an earlier group
            same_place = known.replica == hello.replica and (known.rank == hello.rank or known.group != hello.group)
            if same_place and other in self._hellos:
                replica = self.replica_of(other)
                if replica is not None:
                    out += self.drop(replica, f"rank {hello.rank} said hello again", gone=other)
                self._hellos.pop(other, None)
                if other != peer:
                    out.append((other, Reset("another worker has this name and rank", False)))
        problem = self._problem(hello)
        if problem:
            log.error("worker refused", extra={"peer": peer, "reason": problem})
            return [*out, (peer, Reset(problem, True))]
        self._hellos[peer] = hello
        return out + self._gather(hello.replica, now)

    def other_model(self, name: str, model: str) -> str:
        """Which worker a gateway of this model cannot work with, with both values; empty when it can work with all."""
        for known in self._hellos.values():
            if _folder(model) != _folder(known.model):
                return f"{name} has model {model}, worker {known.replica}/{known.rank} serves model {known.model}"
        return ""

    def _problem(self, hello: WorkerHello) -> str:
        """Why this worker cannot serve here, with both values; empty when it can."""
        cell = self._cell
        name = f"worker {hello.replica}/{hello.rank}"
        if hello.protocol != PROTOCOL:
            return f"{name} speaks protocol {hello.protocol}, the scheduler {PROTOCOL}"
        if hello.page_tokens != cell.page_tokens:
            return f"{name} has pages of {hello.page_tokens} tokens, the scheduler {cell.page_tokens} (block_size)"
        for known in self._hellos.values():
            if hello.model != known.model:
                return f"{name} serves model {hello.model}, worker {known.replica}/{known.rank} model {known.model}"
        for outbox in cell.gateways.values():
            if _folder(hello.model) != _folder(outbox.model):
                return f"{name} serves model {hello.model}, gateway {outbox.name} model {outbox.model}"
        if not 0 <= hello.rank < hello.tp <= MOST_RANKS:
            return f"{name}: rank {hello.rank} of {hello.tp}"
        for field, (least, most) in LIMITS.items():
            if not least <= getattr(hello, field) <= most:
                return f"{name}: {field} is {getattr(hello, field)}, must be {least} to {most}"
        for known in self._hellos.values():
            if known.replica == hello.replica and known.tp != hello.tp:
                return f"{name} is one of {hello.tp} ranks, another rank one of {known.tp}"
        return ""

    def _gather(self, name: str, now: float) -> list[Out]:
        """Start the replica when its last rank has come."""
        ranks = sorted((hello.rank, peer) for peer, hello in self._hellos.items() if hello.replica == name)
        hellos = [self._hellos[peer] for _, peer in ranks]
        if len(ranks) < hellos[0].tp:
            return []
        cell = self._cell
        peers = [peer for _, peer in ranks]
        replica = Replica(hellos, peers, cell.hash_key, cell.credits, now)
        inventories = [_inventory(hello) for hello in hellos]
        dropped = self._dropped.pop(name, None)
        self._pardon(dropped, hellos)

        def trusted(page: int, page_hash: bytes) -> bool:
            on_all = all(inventory.get(page) == page_hash for inventory in inventories)
            return on_all and (dropped is None or dropped.certain.get(page) == page_hash)

        replica.pool.restore([entry for inventory in inventories for entry in inventory.items()], trusted)
        cell.replicas[name] = replica
        cell.learn_limits()
        pages, cached = replica.pool.usable, len(replica.pool.cached)
        log.info("replica ready", extra={"replica": name, "pages": pages, "cached": cached, "slots": replica.num_slots})
        self._turn += 1
        return [(peer, WorkerWelcome(cell.epoch, cell.credits, self._turn)) for peer in peers]

    def _pardon(self, dropped: _Dropped | None, hellos: list[WorkerHello]) -> None:
        """Whoever was only out of reach (frozen, or its link cut) was not killed by what it computed."""
        processes = [hello.process for hello in hellos]
        if dropped is not None and dropped.processes == processes and all(processes):
            for seq in dropped.struck:
                self._cell.pardon(seq)

    def on_gone(self, peer: str, reason: str) -> list[Out]:
        self._faulted.discard(peer)
        replica = self.replica_of(peer)
        out = self.drop(replica, reason, gone=peer) if replica is not None else []
        self._hellos.pop(peer, None)
        return out

    def drop(self, replica: Replica, reason: str, *, step: int = 0, gone: str = "", faulted: str = "") -> list[Out]:
        """Forget all state of a replica. Its sequences go back to their places in the queue; those with a row in the
        failing step get a strike: step, else the oldest in flight; of a worker that is gone any in flight, as it launches a
        plan before it has told the result of the last. gone: that peer needs no Reset; faulted: says hello itself.
        """
        cell = self._cell
        cell.counters.failovers += 1
        suspects = list(replica.in_flight)[: None if gone else 1]
        failing = [flight for flight in replica.in_flight if flight.step == step] or suspects
        struck = list(dict.fromkeys(seq for flight in failing for seq in flight.live))
        was_alone = replica.alone is not None
        processes = [self._hellos[peer].process for peer in replica.peers] if gone else []
        self._dropped[replica.name] = _Dropped(replica.acknowledged(), processes, struck)
        self._forget_dropped()
        log.warning(
            "replica dropped",
            extra={"replica": replica.name, "reason": reason, "sequences": len(replica.running), "struck": len(struck)},
        )
        for seq in struck:
            log.warning(
                "struck", extra={"id": seq.request, "choice": seq.choice, "worker": replica.name, "step": failing[0].step}
            )
        for seq in list(replica.running):
            cell.requeue(seq)
        for seq in struck:
            cell.strike(seq, was_alone)
        del cell.replicas[replica.name]
        cell.learn_limits()
        out: list[Out] = []
        for peer in replica.peers:
            self._hellos.pop(peer, None)
            if peer == faulted:
                self._faulted.add(peer)
            elif peer != gone:
                out.append((peer, Reset(reason, False)))
        return out

    def _forget_dropped(self) -> None:
        """Keep what is remembered of dropped replicas bounded; of the last one all is kept."""
        dropped = self._dropped
        num_pages = sum(len(each.certain) for each in dropped.values())
        while len(dropped) > 1 and (len(dropped) > REMEMBERED_REPLICAS or num_pages > REMEMBERED_PAGES):
            num_pages -= len(dropped.pop(next(iter(dropped))).certain)

    def drain(self, replica: Replica, reason: str) -> list[Out]:
        """It is about to leave: its sequences move at once. The answer tells it that no plan follows those it has."""
        log.info("replica draining", extra={"replica": replica.name, "reason": reason, "sequences": len(replica.running)})
        replica.draining = True
        for seq in list(replica.running):
            self._cell.requeue(seq)
        self._cell.learn_limits()
        return [(peer, Drain(reason)) for peer in replica.peers]

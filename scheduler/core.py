"""What the scheduler does about each message: plain functions of (state, message, now) that return messages to send.

Nothing here reads a clock or a socket. on_* take a message and answer it; pump makes plans and empties the outboxes, and must
follow every call (the service does it once for all messages that arrived together).
"""

from heapq import heapify, heappop, heappush
from typing import assert_never

from scheduler import audit, workers
from scheduler.admission import admit, predicted_wait_s, too_long
from scheduler.cell import Cell
from scheduler.commit import BadResult, Out, commit, flush, hear
from scheduler.outbox import Outbox
from scheduler.planner import plan_round
from scheduler.sequence import Sequence
from shared.columns import read_i64
from shared.messages import (
    PROTOCOL,
    STOPPED,
    Abort,
    Drain,
    DrainAnswer,
    DrainWorker,
    Fault,
    Finish,
    FromGateway,
    FromWorker,
    GatewayHello,
    GatewayWelcome,
    Kept,
    Reject,
    Reset,
    Resume,
    Status,
    StepDone,
    Submit,
    WorkerAlive,
    WorkerHello,
)

STATUS_S = 1.0
AUDIT_S = 1.0
BUSY_AUDITS = 30  # a full audit of a busy replica is made in one of so many


class Core:
    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.workers = workers.Workers(cell)
        self.draining = ""  # reason; empty: not
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._status: tuple[object, ...] = ()
        self._status_at = 0.0
        self._audit_at = 0.0
        self._audits = 0

    # --- gateways -----------------------------------------------------------------------------------------------------

    def on_gateway(self, peer: str, message: FromGateway, now: float) -> list[Out]:
        if isinstance(message, GatewayHello):
            return self._on_gateway_hello(peer, message, now)
        outbox = self.cell.gateways.get(peer)
        if outbox is None:
            return [(peer, Reset("say hello first", False))]
        match message:
            case Submit():
                return self._on_submit(outbox, message, now)
            case Abort():
                reason = Finish.STOP if message.reason == STOPPED else Finish.ABORT
                for sequence_id in read_i64(message.ids):
                    seq = outbox.sequences.get(sequence_id)
                    if seq is not None:
                        self.cell.finish(seq, reason)
                return []
            case Resume():
                return self._on_resume(outbox, message, now)
            case Kept():
                self.cell.shelf.learn(message, peer, now)
                return []
            case DrainWorker():
                return self._on_drain_worker(outbox, message)
            case Drain():  # it sends nothing new; what it still streams goes on
                return []
            case Reset(reason=reason):
                self._drop_gateway(peer, reason)
                return []
            case _:
                assert_never(message)

    def _on_gateway_hello(self, peer: str, hello: GatewayHello, now: float) -> list[Out]:
        if hello.protocol != PROTOCOL:
            text = f"gateway {hello.name} speaks protocol {hello.protocol}, the scheduler {PROTOCOL}"
            return [(peer, Reset(text, True))]
        text = self.workers.other_model(f"gateway {hello.name}", hello.model)
        if text:
            workers.log.error("gateway refused", extra={"peer": peer, "reason": text})
            return [(peer, Reset(text, True))]
        cell = self.cell
        if peer in cell.gateways:
            self._drop_gateway(peer, "said hello again")
        for outbox in cell.gateways.values():
            if outbox.name == hello.name:  # its earlier incarnation; what is still wanted is submitted again
                for seq in list(outbox.sequences.values()):
                    cell.finish(seq, Finish.ABORT)
        cell.born = cell.born or now
        cell.gateways[peer] = Outbox(peer, hello.name, hello.model)
        welcome = GatewayWelcome(PROTOCOL, cell.epoch, cell.page_tokens, cell.hash_key)
        return [(peer, welcome), (peer, self.status(now))]

    def _on_submit(self, outbox: Outbox, submit: Submit, now: float) -> list[Out]:
        cell = self.cell
        seq = admit(cell, outbox, submit, now)
        if isinstance(seq, Reject):
            workers.log.info("refused", extra={"id": submit.request, "choice": submit.choice, "code": seq.code})
            return [cell.rejection(outbox, seq)]
        seq.queued_at = now
        if seq.deadline:
            heappush(self._deadlines, (seq.deadline, seq.order[2], seq))
        self._end_if_over(seq)
        return []

    def _on_resume(self, outbox: Outbox, resume: Resume, now: float) -> list[Out]:
        """Whoever had the stream until now has it no more: its client has left that gateway, or the gateway is dead."""
        shelf = self.cell.shelf
        found: list[Kept] = []
        if (live := shelf.take(resume.stream, resume.tenant)) is not None:
            for seq in live:
                self.cell.finish(seq, Finish.ABORT)
            found = shelf.answer(resume.ask, resume.stream, now)
        nothing = Kept(resume.ask, 0, resume.stream, 0, 0, resume.tenant, b"", b"", 0, -1, 0, 0.0)
        return [(outbox.peer, kept) for kept in found or [nothing]]

    def _on_drain_worker(self, outbox: Outbox, wish: DrainWorker) -> list[Out]:
        replica = self.cell.replicas.get(wish.worker)
        if replica is None:
            names = ", ".join(sorted(self.cell.replicas)) or "none"
            return [(outbox.peer, DrainAnswer(wish.ask, 0, f"there is no worker {wish.worker!r}; connected: {names}"))]
        num_moved = len(replica.running)
        out = self.workers.drain(replica, wish.reason) + self._recheck_waiting()
        return [*out, (outbox.peer, DrainAnswer(wish.ask, num_moved, ""))]

    def _end_if_over(self, seq: Sequence) -> None:
        """A resumed sequence may have reached its end already."""
        limit = self.cell.limit or 2**31
        if seq.num_output > seq.min_new and seq.tokens[-1] in seq.stop_ids:
            self.cell.finish(seq, Finish.STOP)
        elif seq.num_output and len(seq.tokens) >= min(seq.num_prompt + seq.max_new, limit):
            self.cell.finish(seq, Finish.LENGTH)

    def _drop_gateway(self, peer: str, reason: str) -> None:
        outbox = self.cell.gateways.pop(peer, None)
        if outbox is not None:
            workers.log.info("gateway gone", extra={"peer": peer, "reason": reason, "sequences": len(outbox.sequences)})
            for seq in list(outbox.sequences.values()):
                self.cell.detach(seq)
                self.cell.drop(seq, Finish.ABORT)
            self.cell.shelf.lose(peer)

    # --- workers ------------------------------------------------------------------------------------------------------

    def on_worker(self, peer: str, message: FromWorker, now: float) -> list[Out]:
        if isinstance(message, WorkerHello):
            out = self.workers.on_hello(peer, message, now)
            return out + self._recheck_waiting()
        replica = self.workers.replica_of(peer)
        if replica is None:
            return self.workers.on_stranger(peer)
        match message:
            case StepDone():
                try:
                    done = hear(replica, peer, message)
                    if done is None:
                        return []
                    if not replica.in_flight:
                        raise BadResult(f"StepDone of step {done.step}, but no plan is in flight")
                    return commit(self.cell, replica, done, now)
                except BadResult as error:
                    return self.workers.drop(replica, str(error)) + self._recheck_waiting()
            case WorkerAlive():
                replica.memory_bytes[peer] = (message.memory_used_bytes, message.memory_total_bytes)
                return []
            case Fault():
                text = f"step {message.step} failed: {message.text}"
                return self.workers.drop(replica, text, step=message.step, faulted=peer) + self._recheck_waiting()
            case Drain(reason=reason):
                return self.workers.drain(replica, reason) + self._recheck_waiting()
            case Reset(reason=reason):
                return self.workers.drop(replica, reason, gone=peer) + self._recheck_waiting()
            case _:
                assert_never(message)

    def _recheck_waiting(self) -> list[Out]:
        """The replicas have changed: what can never fit into those there are is refused or ends."""
        out: list[Out] = []
        for seq in list(self.cell.waiting):
            text = too_long(self.cell, seq)
            if text and not seq.num_output:
                if seq.started:
                    self.cell.finish(seq, Finish.ERROR)
                else:
                    out.append(self.cell.refuse(seq, 400, "context_length_exceeded", text))
            else:
                self._end_if_over(seq)
        return out

    # --- both ---------------------------------------------------------------------------------------------------------

    def on_gone(self, peer: str, reason: str, now: float) -> list[Out]:
        """A socket's peer is silent or unreachable."""
        self._drop_gateway(peer, reason)
        return self.workers.on_gone(peer, reason) + self._recheck_waiting()

    def pump(self, now: float) -> list[Out]:
        """Plans for whoever has a credit (they leave first), then everything the gateways are to be told."""
        out: list[Out] = []
        while plans := plan_round(self.cell, now):
            for replica, plan in plans:
                if len(replica.in_flight) == 1:
                    replica.oldest_since = now
                out.extend([(peer, plan) for peer in replica.peers])
        out.extend(flush(self.cell))
        return out

    def excuse(self, stalled_s: float) -> None:
        """This process did not run for so long: results may lie unread, so no step is late because of it."""
        for replica in self.cell.replicas.values():
            replica.oldest_since += stalled_s

    def start_over(self, reason: str) -> list[Out]:
        """A plan round failed half-way: no replica's state can be trusted, the sequences and their tokens can."""
        out: list[Out] = []
        for replica in list(self.cell.replicas.values()):
            out += self.workers.drop(replica, reason)
        return out + self._recheck_waiting()

    def tick(self, now: float) -> list[Out]:
        """Time passes: deadlines, hung workers, audits, status. Called a few times a second, before pump."""
        out = self._pass_deadlines(now)
        self.cell.shelf.tick(now)
        out += self.cell.shelf.entrust({peer: outbox.name for peer, outbox in self.cell.gateways.items()})
        for replica in list(self.cell.replicas.values()):
            waited_s = now - replica.oldest_since
            if replica.in_flight and waited_s > self.cell.step_timeout_s:
                text = f"step {replica.in_flight[0].step} has run for {waited_s:.1f} s, limit {self.cell.step_timeout_s} s"
                out += self.workers.drop(replica, text) + self._recheck_waiting()
        if now >= self._audit_at + AUDIT_S:
            self._audit_at = now
            self.cell.accounts.forget_idle()
            self._sweep_deadlines()
            self._audit()
        status = self.status(now)
        signature = (status.state, status.reason, status.max_model_len, status.pool_tokens)
        if signature != self._status or now >= self._status_at + STATUS_S:
            self._status, self._status_at = signature, now
            out.extend([(peer, status) for peer in self.cell.gateways])
        return out

    def _pass_deadlines(self, now: float) -> list[Out]:
        out: list[Out] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, seq = heappop(self._deadlines)
            if seq.outbox.sequences.get(seq.id) is not seq:
                continue
            if seq.started or seq.num_output:
                self.cell.finish(seq, Finish.DEADLINE)
            else:
                text = f"the request waited {now - seq.order[1]:.1f} s and its deadline passed before it could start"
                out.append(self.cell.refuse(seq, 504, "deadline_exceeded", text))
        return out

    def _sweep_deadlines(self) -> None:
        """Sequences end long before their deadline: those that have are dropped when they are the greater part."""
        live = sum(len(outbox.sequences) for outbox in self.cell.gateways.values())
        if len(self._deadlines) > 2 * live:
            self._deadlines = [each for each in self._deadlines if each[2].outbox.sequences.get(each[2].id) is each[2]]
            heapify(self._deadlines)

    def _audit(self) -> None:
        """Everything when idle; when busy the sums, and now and then everything."""
        self._audits += 1
        for replica in self.cell.replicas.values():
            thorough = not replica.running or self._audits % BUSY_AUDITS == 0
            audit.audit_and_repair(self.cell, replica, thorough=thorough)

    def status(self, now: float) -> Status:
        cell = self.cell
        if self.draining:
            state, reason = "draining", self.draining
        elif cell.placeable:
            state, reason = "ready", ""
        else:
            state, reason = "loading", "no worker is connected" if not cell.replicas else "the only workers are leaving"
        known = bool(cell.placeable)
        return Status(
            state,
            reason,
            cell.max_model_len if known else 0,
            cell.pool_tokens if known else 0,
            len(cell.waiting),
            cell.num_running,
            predicted_wait_s(cell, now),
        )

    def leave(self, reason: str, now: float) -> list[Out]:
        """This process ends. Gateways keep their streams and workers their pages; both look for the next scheduler."""
        self.draining = reason
        status = self.status(now)
        out: list[Out] = flush(self.cell)
        for peer in self.cell.gateways:
            out += [(peer, status), (peer, Reset(reason, False))]
        out += [(peer, Reset(reason, False)) for peer in self.workers.peers]
        return out

"""The state of one cell: replicas, queue, gateways, counters; and the few moves of a sequence between them."""

import math
from collections import deque
from dataclasses import dataclass, field

from scheduler.accounts import Accounts
from scheduler.counters import Counters
from scheduler.forecast import OutputLengths
from scheduler.outbox import Outbox
from scheduler.replica import Replica
from scheduler.sequence import Sequence
from scheduler.shelf import Shelf
from scheduler.start_rate import StartRate
from scheduler.waiting import Waiting
from scheduler.workload import DecodeSpeed
from shared.messages import Finish, Reject

RATE_WINDOW_S = 30.0
MOST_ENDED = 65536  # ends that nobody has taken note of
ALONE_TOKENS = (0, 1, 16, 64, 256)  # that a sequence runs by itself after so many strikes: first only its prefill is tried
MAX_PARDONS = 8  # of one sequence: a worker may also be silent because of it, again and again

REASONS = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.ABORT: "abort",
    Finish.ERROR: "error",
    Finish.DEADLINE: "deadline",
}


@dataclass(slots=True, kw_only=True)
class Cell:
    page_tokens: int
    hash_key: bytes
    epoch: int
    credits: int
    max_queued: int
    step_timeout_s: float
    max_queued_tokens: int = 0  # 0: no limit
    max_wait_s: float = 0.0  # 0: no limit
    replicas: dict[str, Replica] = field(default_factory=dict)  # by name
    gateways: dict[str, Outbox] = field(default_factory=dict)  # by peer
    waiting: Waiting = field(default_factory=Waiting)
    accounts: Accounts = field(default_factory=Accounts)
    shelf: Shelf = field(default_factory=Shelf)
    counters: Counters = field(default_factory=Counters)
    lengths: OutputLengths = field(default_factory=OutputLengths)
    speed: DecodeSpeed = field(default_factory=DecodeSpeed)
    ended: deque[tuple[Sequence, str]] = field(default_factory=lambda: deque(maxlen=MOST_ENDED))  # and why: for the journal
    last_step: int = 0  # steps are numbered through the whole cell, so a stale one matches no plan
    last_serial: int = 0
    born: float = 0.0  # clock time of its first gateway
    max_model_len: int = 0  # of the replicas known now, or known last
    pool_tokens: int = 0
    starts_per_s: float = 0.0  # sequences that entered a first plan, smoothed
    last_start: float = 0.0
    queue_rate: StartRate = field(default_factory=StartRate)

    @property
    def placeable(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if not replica.draining]

    @property
    def num_running(self) -> int:
        return sum(len(replica.running) for replica in self.replicas.values())

    @property
    def limit(self) -> int:
        """Most tokens of one sequence; 0 while no worker has ever been here."""
        return min(self.max_model_len, self.pool_tokens)

    def learn_limits(self) -> None:
        """Keep the last known limits while there is no replica: a restarting worker comes back as it was."""
        known = self.placeable
        if known:
            best = max(known, key=lambda replica: replica.limit)
            self.max_model_len, self.pool_tokens = best.max_model_len, best.pool_tokens

    def note_start(self, now: float) -> None:
        """Exponentially forgotten count of starts, per second."""
        self.starts_per_s = self.start_rate(now) + 1.0 / RATE_WINDOW_S
        self.last_start = now
        self.queue_rate.on_start(now, len(self.waiting) > 0)

    def start_rate(self, now: float) -> float:
        return self.starts_per_s * math.exp(-max(now - self.last_start, 0.0) / RATE_WINDOW_S)

    # --- moves of a sequence ------------------------------------------------------------------------------------------

    def detach(self, seq: Sequence) -> None:
        """Take it from wherever it is."""
        if seq.replica is not None:
            seq.replica.release(seq)
        else:
            self.waiting.remove(seq)

    def requeue(self, seq: Sequence) -> None:
        """From a replica back to its old place in the queue, with its tokens."""
        assert seq.replica is not None
        seq.replica.release(seq)
        self.waiting.add(seq)

    def preempt(self, seq: Sequence) -> None:
        self.requeue(seq)
        seq.preemptions += 1  # after the release, which still counts it by its old class
        self.counters.preemptions += 1

    def finish(self, seq: Sequence, reason: int) -> None:
        """The end of a sequence that its gateway is told about."""
        self.detach(seq)
        self.drop(seq, reason)
        seq.outbox.finish(seq.id, reason)
        if reason in (Finish.STOP, Finish.LENGTH) and seq.max_new:
            self.lengths.add(seq.num_output)

    def drop(self, seq: Sequence, reason: int) -> None:
        """Forget a detached sequence."""
        del seq.outbox.sequences[seq.id]
        seq.account.live -= 1
        seq.generation += 1
        self.shelf.keep(seq, reason)
        self.counters.finished[REASONS[reason]] += 1
        self.ended.append((seq, REASONS[reason]))
        if reason == Finish.ABORT:
            self.counters.aborts += 1

    def refuse(self, seq: Sequence, status: int, code: str, text: str, retry_after_s: float = 0.0) -> tuple[str, Reject]:
        """The end of a waiting sequence of which no token was ever sent."""
        self.waiting.remove(seq)
        del seq.outbox.sequences[seq.id]
        seq.account.live -= 1
        self.shelf.forget(seq)
        self.ended.append((seq, code))
        return self.rejection(seq.outbox, Reject(seq.id, status, code, text, "", retry_after_s))

    def rejection(self, outbox: Outbox, reject: Reject) -> tuple[str, Reject]:
        self.counters.rejected[reject.code] += 1
        return outbox.peer, reject

    def strike(self, seq: Sequence, was_alone: bool) -> None:
        """It had a row in a step that failed. Bound no more; the next time it runs by itself, or not at all."""
        if len(seq.tokens) > seq.struck_len + 256 and not was_alone:
            seq.strikes = 0  # it has come far since: that failure was not its own
        seq.strikes += 1
        seq.struck_len = len(seq.tokens)
        num_alone = ALONE_TOKENS[min(seq.strikes, len(ALONE_TOKENS) - 1)] if seq.max_new else 1
        seq.alone_until = len(seq.tokens) + num_alone
        if was_alone and seq.strikes >= 2:
            self.finish(seq, Finish.ERROR)

    def pardon(self, seq: Sequence) -> None:
        """The worker of its last strike has come back alive."""
        if seq.strikes and seq.pardons < MAX_PARDONS:
            seq.strikes -= 1
            seq.pardons += 1
            seq.alone_until = seq.alone_until if seq.strikes else 0

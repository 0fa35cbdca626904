"""The gateway's end of its link: submits and aborts sequences, hands each token to its sequence, and outlives the scheduler.

A sequence is told to the scheduler under a fresh id each time, so whatever arrives late for an earlier id finds nobody.
"""

import asyncio
import contextlib
import logging
import math
import os
import re
import socket
from typing import Any, assert_never

from gateway.drains import Drains
from gateway.errors import Unavailable
from gateway.metrics import Metrics
from gateway.sequence import Score, Sequence
from gateway.takeovers import Takeovers
from shared import columns, keys
from shared.codec import Codec
from shared.config import Config
from shared.messages import (
    PROTOCOL,
    SCHEDULER_TO_GATEWAY,
    STOPPED,
    Abort,
    Drain,
    DrainAnswer,
    GatewayHello,
    GatewayWelcome,
    Kept,
    PromptScores,
    Reject,
    Reset,
    Status,
    ToGateway,
    Tokens,
)
from shared.wire import Link

log = logging.getLogger("quire.gateway")

REFUSED_RETRY_S = 5.0  # pause after the scheduler refused us for good: it may be replaced by one that does not
MISSING = -9999.0  # printed for a log-probability of minus infinity (JSON has none)


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else MISSING


def peer_name(config: Config) -> str:
    name = config.name or f"{socket.gethostname()}-{os.getpid()}"
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:64]


class Service:
    """All live sequences of this process, and whether anybody computes them."""

    def __init__(self, config: Config, fingerprint: str, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._fingerprint = fingerprint
        self._name = peer_name(config)
        self._loop = asyncio.get_running_loop()
        self._live: dict[int, Sequence] = {}  # by the id the scheduler knows
        self._next_id = 1
        self._to_abort: list[int] = []
        self._stopped: list[int] = []  # ended at a stop string since then
        self._link: Link | None = None
        self._welcome: GatewayWelcome | None = None
        self._status: Status | None = None
        self._lost = "not connected yet"
        self.epoch = 0  # of the last scheduler that welcomed us
        self._welcomed = 0.0  # loop time of the first welcome of that scheduler
        self._takeovers = Takeovers(config.resume_grace_s)
        self._drains = Drains()
        self.num_resubmitted = 0

    # --- what the rest of the gateway asks

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def welcome(self) -> GatewayWelcome | None:
        return self._welcome

    @property
    def status(self) -> Status | None:
        """The scheduler's state; None while it is out of reach."""
        return self._status if self._welcome else None

    @property
    def max_len(self) -> int:
        """Tokens one sequence may have, prompt and output; 0: never heard."""
        if self._status is None:
            return 0
        sizes = [size for size in (self._status.max_model_len, self._status.pool_tokens) if size > 0]
        return min(sizes, default=0)

    def unavailable(self) -> Unavailable | None:
        """Why a new request cannot be taken now; None: it can."""
        if self._welcome is None:
            return Unavailable(f"The scheduler is not reachable: {self._lost}", 2, "scheduler_unavailable")
        if self._status is None:
            return Unavailable("The scheduler has not reported its state yet", 1, "scheduler_unavailable")
        if self._status.state != "ready" or not self._status.max_model_len:
            reason = self._status.reason or f"the server is {self._status.state}"
            return Unavailable(f"Not ready: {reason}", max(2, self._status.wait_s), self._status.state)
        return None

    def submit(self, sequence: Sequence, *, again: bool = False) -> None:
        """Take charge of a sequence. While nobody is connected it waits here. again: it was submitted before."""
        sequence.id = self._next_id
        self._next_id += 1
        self._live[sequence.id] = sequence
        if self._welcome is not None and self._link is not None:
            sequence.epoch = self.epoch
            self._link.send(sequence.submit(self._welcome, self._loop.time(), again=again))

    async def take(self, stream: str, tenant: str) -> list[Kept]:
        """Take a stream from whoever has it; it is nobody's until it is submitted again. Empty: there is no such stream."""
        resume, answer = self._takeovers.ask(stream, tenant)
        self._ask(resume)
        found = await answer
        if not found and self._loop.time() - self._welcomed < 2 * self._config.silence_s + 1:
            raise Unavailable("The scheduler has just started and does not know every stream yet", 1, "scheduler_unavailable")
        return found

    async def drain_worker(self, worker: str) -> DrainAnswer:
        """Have the scheduler send a worker away."""
        question, answer = self._drains.ask(worker)
        self._ask(question)
        return await answer

    def _ask(self, question: tuple[Any, ...]) -> None:
        if self._welcome is None or self._link is None:
            raise Unavailable(f"The scheduler is not reachable: {self._lost}", 1, "scheduler_unavailable")
        self._link.send(question)

    def keep(self, sequences: list[Sequence]) -> None:
        """Streams that another gateway may take over are left here, or have ended."""
        for sequence in sequences:
            kept = self._takeovers.leave(sequence, self._loop.time())
            if sequence.epoch != self.epoch and self._welcome is not None and self._link is not None:
                self._link.send(kept)  # it ended under the scheduler before this one

    def drop(self, sequence: Sequence, *, stopped: bool = False) -> None:
        """Forget a sequence; if it is still computed, say so. Nothing is called for it any more. stopped: its text has ended
        at a stop string, so its answer is whole."""
        if self._live.pop(sequence.id, None) is None:
            return
        if not self._to_abort and not self._stopped:
            self._loop.call_soon(self._flush_aborts)
        (self._stopped if stopped else self._to_abort).append(sequence.id)
        sequence.id = 0

    def _flush_aborts(self) -> None:
        aborted, self._to_abort = self._to_abort, []
        stopped, self._stopped = self._stopped, []
        if self._welcome is None or self._link is None:
            return
        if aborted:
            self._link.send(Abort(columns.i64(aborted), "the client does not need it any more"))
        if stopped:
            self._link.send(Abort(columns.i64(stopped), STOPPED))

    # --- the link

    async def run(self) -> None:
        """Keep a link to the scheduler, until cancelled."""
        codec = Codec(SCHEDULER_TO_GATEWAY)
        config = self._config
        while True:
            self._link = Link(
                config.gateway_link,
                f"g/{self._name}",
                codec,
                self,
                heartbeat_s=config.heartbeat_s,
                silence_s=config.silence_s,
                keys=keys.link_keys(config.curve_dir, keys.GATEWAY),
            )
            try:
                await self._link.run()
            finally:
                self._flush_aborts()
                self._link.close()
                self._welcome = None
            await asyncio.sleep(REFUSED_RETRY_S)

    def hello(self) -> tuple[Any, ...]:
        return GatewayHello(PROTOCOL, self._name, self._fingerprint)

    def on_lost(self, reason: str, fatal: bool) -> None:
        log.warning("scheduler lost", extra={"reason": reason, "fatal": fatal, "live": len(self._live)})
        self._welcome = None
        self._lost = reason
        self._to_abort = []
        self._stopped = []
        self._takeovers.on_lost()
        self._drains.on_lost()

    def on_message(self, message: ToGateway) -> None:
        match message:
            case Tokens():
                self._on_tokens(message)
            case PromptScores():
                self._on_scores(message)
            case Status():
                if self._status is None or message.state != self._status.state:
                    log.info("scheduler state", extra={"state": message.state, "reason": message.reason})
                self._status = message
            case Reject():
                sequence = self._live.pop(message.id, None)
                if sequence is not None:
                    sequence.id = 0
                    sequence.sink.on_reject(message)
            case GatewayWelcome():
                self._on_welcome(message)
            case Kept():
                self._takeovers.on_kept(message, self._loop.time())
            case DrainAnswer():
                self._drains.on_answer(message)
            case Drain():
                if self._status is not None:
                    self._status = self._status._replace(state="draining", reason=message.reason)
            case Reset():  # the link itself handles it
                pass
            case _:
                assert_never(message)

    def _on_welcome(self, welcome: GatewayWelcome) -> None:
        if welcome.protocol != PROTOCOL:
            log.error("scheduler speaks another protocol", extra={"theirs": welcome.protocol, "ours": PROTOCOL})
            self._lost = f"it speaks protocol {welcome.protocol}, this gateway {PROTOCOL}"
            return
        self._welcome = welcome
        if self.epoch != welcome.epoch:
            self.epoch, self._status, self._welcomed = welcome.epoch, None, self._loop.time()
            self._tell_kept()
        log.info("connected to the scheduler", extra={"epoch": welcome.epoch, "live": len(self._live)})
        for sequence in list(self._live.values()):
            self._resubmit(sequence)

    def _tell_kept(self) -> None:
        assert self._link is not None  # it has just brought a welcome
        for kept in self._takeovers.untold(self._loop.time()):
            self._link.send(kept)

    def _resubmit(self, sequence: Sequence) -> None:
        """Continue a sequence from the ids it has. Its old id is dead."""
        del self._live[sequence.id]
        reason = sequence.finished_reason
        if reason:
            sequence.id = 0
            self._finish(sequence, reason)
            return
        self.num_resubmitted += 1
        self.submit(sequence, again=True)

    # --- results

    def _on_tokens(self, message: Tokens) -> None:
        live = self._live
        for sequence_id, cached in zip(
            columns.read_i64(message.started_ids), columns.read_i32(message.started_cached), strict=True
        ):
            if (sequence := live.get(sequence_id)) is not None and sequence.cached < 0:
                sequence.cached = min(cached, len(sequence.prompt.ids))
        now = self._loop.time()
        accepted = 0
        scored = len(message.logprobs) > 0
        rows = zip(
            columns.read_i64(message.ids), columns.read_i32(message.indexes), columns.read_i32(message.tokens), strict=True
        )
        for row, (sequence_id, index, token) in enumerate(rows):
            sequence = live.get(sequence_id)
            if sequence is None:
                continue
            if index != len(sequence.output):
                if index > len(sequence.output):
                    self._on_gap(sequence, index)
                continue
            sequence.output.append(token)
            accepted += 1
            score = _score(message, row, sequence.recipe.sampling.logprobs) if scored else None
            try:
                sequence.sink.on_token(token, score, now)
            except Exception:
                self._break(sequence)
        self._metrics.generated_tokens += accepted
        for sequence_id, reason in zip(columns.read_i64(message.finished_ids), message.finished_reasons, strict=True):
            sequence = live.pop(sequence_id, None)
            if sequence is not None:
                sequence.id = 0
                self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: int) -> None:
        try:
            sequence.sink.on_finish(reason)
        except Exception:
            self._break(sequence)

    def _break(self, sequence: Sequence) -> None:
        """A fault in the handling of one sequence ends that one; the rows of the others follow."""
        log.exception("cannot handle a sequence", extra={"sequence": sequence.id})
        self.drop(sequence)
        with contextlib.suppress(Exception):
            sequence.sink.on_failure("Internal error while the answer was written")

    def _on_gap(self, sequence: Sequence, index: int) -> None:
        log.warning("tokens are missing", extra={"sequence": sequence.id, "have": len(sequence.output), "got": index})
        if not self._to_abort:
            self._loop.call_soon(self._flush_aborts)
        self._to_abort.append(sequence.id)
        self._resubmit(sequence)

    def _on_scores(self, message: PromptScores) -> None:
        sequence = self._live.get(message.id)
        if sequence is None:
            return
        count = len(message.logprobs) // 4
        if message.start > sequence.num_scored:
            self._on_gap(sequence, message.start)
            return
        width = sequence.recipe.sampling.score_width
        scores = [_prompt_score(message, row, width) for row in range(sequence.num_scored - message.start, count)]
        if scores:
            sequence.num_scored += len(scores)
            try:
                sequence.sink.on_scores(scores)
            except Exception:
                self._break(sequence)


def _score(message: Tokens, row: int, wanted: int) -> Score | None:
    if wanted < 0:
        return None
    logprob = columns.read_f32(message.logprobs)[row]
    return Score(finite(logprob), _top(message.top_ids, message.top_logprobs, message.top_width, row, wanted))


def _prompt_score(message: PromptScores, row: int, wanted: int) -> Score:
    logprob = columns.read_f32(message.logprobs)[row]
    return Score(finite(logprob), _top(message.top_ids, message.top_logprobs, message.top_width, row, wanted))


def _top(ids: bytes, logprobs: bytes, width: int, row: int, wanted: int) -> list[tuple[int, float]]:
    """The wanted alternatives of one row; what was ruled out (minus infinity) is left out."""
    start, end = row * width, row * width + min(width, wanted)
    pairs = zip(columns.read_i32(ids)[start:end], columns.read_f32(logprobs)[start:end], strict=True)
    return [(token, logprob) for token, logprob in pairs if math.isfinite(logprob)]

"""A scheduler that plays scripted tokens over the real Hub. It keeps the contract of ARCHITECTURE.md, or breaks it when told.

What a sequence says depends only on the script and on how many output tokens it already has, so a resumed sequence goes on
where it was, as with a real scheduler.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from shared import columns
from shared.codec import Codec
from shared.messages import (
    GATEWAY_TO_SCHEDULER,
    PROTOCOL,
    Abort,
    Drain,
    Finish,
    FromGateway,
    GatewayHello,
    GatewayWelcome,
    PromptScores,
    Reject,
    Reset,
    Status,
    Submit,
    Tokens,
)
from shared.sampling import Sampling, unpack_edits
from shared.wire import Hub

Top = list[tuple[int, float]]
READY = Status("ready", "", 2048, 100_000, 0, 0, 0.0)


@dataclass
class Play:
    """What one sequence does. When its tokens run out it samples a stop id, or goes on with its last token if it has none."""

    tokens: list[int]
    delay_s: float = 0.0  # before every message
    per_message: int = 1  # tokens in one message
    hold: bool = False  # says nothing, until released
    reject: Reject | None = None
    reason: int = 0  # finish reason instead of the true one, once the tokens ran out
    top: Top = field(default_factory=list)  # alternatives of every sampled and every prompt token
    logprob: float = -0.5
    cached: int = 0
    skip: int = -1  # output index whose message is lost once
    twice: bool = False  # every message is sent twice


Script = Callable[[Submit, Sampling], Play]


class StubScheduler:
    """Handler of a Hub. play: what the next sequences do, by script or by a queue of plays that comes first."""

    def __init__(self, canary: list[int]) -> None:
        self.plays: list[Play] = []
        self.script: Script = lambda submit, sampling: Play(canary)
        self.status = READY
        self.epoch = 1
        self.fatal = ""  # refuse every gateway with this text
        self.submits: list[Submit] = []
        self.aborted: list[int] = []
        self.abort_reasons: list[str] = []
        self.finished: list[int] = []
        self.hellos: list[GatewayHello] = []
        self.running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.released = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._hub: Hub | None = None
        self._skipped = False

    # --- life and death

    def start(self, address: str = "tcp://127.0.0.1:0", silence_s: float = 1.0) -> str:
        self._hub = Hub(address, Codec(GATEWAY_TO_SCHEDULER), self, heartbeat_s=0.1, silence_s=silence_s)
        self._spawn(self._hub.run())
        return self._hub.address

    async def start_again(self, address: str) -> None:
        """Bind the same address once more: the socket that died may hold it for a moment."""
        for _ in range(200):
            try:
                self.start(address)
                return
            except OSError:
                await asyncio.sleep(0.02)
        self.start(address)

    async def die(self) -> None:
        """Vanish without a word, with everything this incarnation knew."""
        assert self._hub is not None
        self._hub.close()
        self.running.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.epoch += 1

    def say(self, status: Status) -> None:
        """Change the state and tell every gateway."""
        self.status = status
        self._to_all(status)

    def drain(self, reason: str) -> None:
        self._to_all(Drain(reason))

    def reset_all(self) -> None:
        """Forget every gateway, as after a long silence."""
        assert self._hub is not None
        for task in self.running.values():
            task.cancel()
        self.running.clear()
        for peer in self._hub.peers:
            self._hub.send(peer, Reset("who are you?", False))

    def _to_all(self, message: tuple[Any, ...]) -> None:
        assert self._hub is not None
        for peer in self._hub.peers:
            self._hub.send(peer, message)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- HubHandler

    def on_message(self, peer: str, message: FromGateway) -> None:
        assert self._hub is not None
        match message:
            case GatewayHello():
                self.hellos.append(message)
                if self.fatal:
                    self._hub.send(peer, Reset(self.fatal, True))
                    return
                self._hub.send(peer, GatewayWelcome(PROTOCOL, self.epoch, 16, b"k" * 32))
                self._hub.send(peer, self.status)
            case Submit():
                self.submits.append(message)
                self.running[peer, message.id] = self._spawn(self._perform(peer, message))
            case Abort():
                ids = columns.read_i64(message.ids).tolist()
                self.aborted += ids
                self.abort_reasons.append(message.reason)
                for sequence_id in ids:
                    if (task := self.running.pop((peer, sequence_id), None)) is not None:
                        task.cancel()
            case Drain() | Reset():
                pass

    def on_gone(self, peer: str, reason: str) -> None:
        for key in [key for key in self.running if key[0] == peer]:
            self.running.pop(key).cancel()

    # --- playing

    async def _perform(self, peer: str, submit: Submit) -> None:
        sampling = Sampling.unpack(submit.sampling)
        play = self.plays.pop(0) if self.plays else self.script(submit, sampling)
        try:
            await self._play(peer, submit, sampling, play)
        finally:
            if self.running.get((peer, submit.id)) is asyncio.current_task():
                del self.running[peer, submit.id]

    async def _play(self, peer: str, submit: Submit, sampling: Sampling, play: Play) -> None:
        assert self._hub is not None
        if play.reject is not None:
            self._hub.send(peer, play.reject._replace(id=submit.id))
            return
        if play.hold:
            await self.released.wait()
        if play.delay_s:
            await asyncio.sleep(play.delay_s)
        known = columns.read_i32(submit.tokens).tolist()
        if sampling.score_width >= 0:
            self._hub.send(peer, _scores(submit.id, known, submit.num_prompt, sampling, play))
        said = known[submit.num_prompt :]
        start, reason = [(submit.id, play.cached)], 0
        if submit.max_new == 0:
            reason = Finish.LENGTH
            self._hub.send(peer, _tokens(submit.id, 0, [], sampling, play, start, reason))
        while not reason:
            rows: list[int] = []
            first = len(said)
            while len(rows) < play.per_message and not reason:
                token, reason = _next(play, submit, said)
                if token >= 0:
                    rows.append(token)
                    said.append(token)
            message = _tokens(submit.id, first, rows, sampling, play, start, reason)
            start = []
            if first == play.skip and not self._skipped:
                self._skipped = True
                continue
            for _ in range(2 if play.twice else 1):
                self._hub.send(peer, message)
            await asyncio.sleep(play.delay_s)
        self.finished.append(submit.id)


def _next(play: Play, submit: Submit, said: list[int]) -> tuple[int, int]:
    """(token or -1, finish reason or 0)"""
    stop_ids = columns.read_i32(submit.stop_ids).tolist()
    forced = _forced(submit, len(said))
    at = len(said)
    if at < len(play.tokens):
        token = play.tokens[at]
    elif play.reason:
        return -1, play.reason
    else:
        token = stop_ids[0] if stop_ids else play.tokens[-1]
    if at < submit.min_new and token in stop_ids:  # as the device: a forbidden id gives way to the likeliest other
        token = play.tokens[0] if play.tokens[0] not in stop_ids else 100
    if forced is not None:
        token = forced
    if token in stop_ids and at >= submit.min_new:
        return token, Finish.STOP
    return token, Finish.LENGTH if at + 1 >= submit.max_new else 0


def _forced(submit: Submit, at: int) -> int | None:
    """The token that a bias of +100 asks for, unless it is forbidden now."""
    edits = [edit for edit in unpack_edits(submit.edits) if at < edit.until]
    forbidden = {edit.token for edit in edits if edit.value == -math.inf}
    for edit in edits:
        if edit.value >= 100 and edit.token not in forbidden:
            return edit.token
    return None


def _columns(rows: int, width: int, play: Play) -> tuple[bytes, bytes]:
    top = (play.top + [(0, -math.inf)] * width)[:width]
    return columns.i32([token for token, _ in top] * rows), columns.f32([logprob for _, logprob in top] * rows)


def _tokens(
    sequence_id: int, first: int, rows: list[int], sampling: Sampling, play: Play, start: list[tuple[int, int]], reason: int
) -> Tokens:
    asked = sampling.logprobs >= 0 and bool(rows)
    width = sampling.logprobs if asked else 0
    top_ids, top_logprobs = _columns(len(rows), width, play)
    return Tokens(
        ids=columns.i64([sequence_id] * len(rows)),
        indexes=columns.i32(range(first, first + len(rows))),
        tokens=columns.i32(rows),
        logprobs=columns.f32([play.logprob] * len(rows)) if asked else b"",
        top_width=width,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        started_ids=columns.i64([each for each, _ in start]),
        started_cached=columns.i32([cached for _, cached in start]),
        finished_ids=columns.i64([sequence_id] if reason else []),
        finished_reasons=bytes([reason] if reason else []),
    )


def _scores(sequence_id: int, known: list[int], num_prompt: int, sampling: Sampling, play: Play) -> PromptScores:
    rows = num_prompt - 1
    top_ids, top_logprobs = _columns(rows, sampling.score_width, play)
    logprobs = columns.f32([-float(at) for at in range(1, rows + 1)])
    return PromptScores(sequence_id, 1, logprobs, sampling.score_width, top_ids, top_logprobs)

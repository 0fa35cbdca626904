"""The gateway's end of streams that change hands: questions under way, and what a new scheduler has to be told.

The scheduler keeps what its gateways leave or finish, for a grace time. A scheduler that has just started knows nothing of
that, so every gateway remembers what it left itself, and says it again.
"""

import asyncio
from collections import deque
from typing import NamedTuple

from gateway.errors import Unavailable
from gateway.sequence import Sequence
from shared.messages import Kept, Resume

MAX_BYTES = 64 * 2**20  # of what is remembered; beyond it the oldest go first
ENTRY_BYTES = 400  # of one choice besides its columns


class _Left(NamedTuple):
    at: float  # loop time
    kept: Kept

    @property
    def num_bytes(self) -> int:
        return len(self.kept.tokens) + len(self.kept.ticket) + ENTRY_BYTES


class _Ask(NamedTuple):
    answer: "asyncio.Future[list[Kept]]"
    found: list[Kept]


class Takeovers:
    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._asks: dict[int, _Ask] = {}
        self._last_ask = 0
        self._left: deque[_Left] = deque()
        self._num_bytes = 0

    def ask(self, stream: str, tenant: str) -> "tuple[Resume, asyncio.Future[list[Kept]]]":
        """The question to send, and its answer: what is known of every choice, or nothing."""
        self._last_ask += 1
        answer = asyncio.get_running_loop().create_future()
        self._asks[self._last_ask] = _Ask(answer, [])
        number = self._last_ask
        answer.add_done_callback(lambda _: self._asks.pop(number, None))
        return Resume(number, stream, tenant), answer

    def on_kept(self, kept: Kept) -> None:
        ask = self._asks.get(kept.ask)
        if ask is None or ask.answer.done():
            return
        if kept.total:
            ask.found.append(kept)
        if len(ask.found) == kept.total:
            ask.answer.set_result(ask.found)

    def on_lost(self) -> None:
        """Nobody will answer."""
        for ask in list(self._asks.values()):
            if not ask.answer.done():
                ask.answer.set_exception(Unavailable("The scheduler went away", 1, "scheduler_unavailable"))

    def leave(self, sequence: Sequence, now: float) -> Kept:
        """Nobody reads it here any more, or it has ended. Returns what a scheduler has to be told that does not know it."""
        left = _Left(now, sequence.kept(now))
        self._left.append(left)
        self._num_bytes += left.num_bytes
        self._expire(now)
        return left.kept

    def untold(self, now: float) -> list[Kept]:
        """What a scheduler that has just started does not know."""
        self._expire(now)
        return [each.kept._replace(age_s=each.kept.age_s + now - each.at) for each in self._left]

    def _expire(self, now: float) -> None:
        while self._left and (self._left[0].at + self._grace_s <= now or self._num_bytes > MAX_BYTES):
            self._num_bytes -= self._left.popleft().num_bytes

"""The gateway's end of streams that change hands: questions under way, and what a new scheduler has to be told.

The scheduler keeps what its gateways leave or finish, for a grace time. A scheduler that has just started knows nothing of
that, so every gateway remembers what it left itself, and what the scheduler entrusted to it of others, and says it again.
"""

import asyncio
from collections import OrderedDict, deque
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
        self._entrusted: OrderedDict[str, dict[int, _Left]] = OrderedDict()  # by stream and choice, of other gateways
        self._entrusted_bytes = 0

    def ask(self, stream: str, tenant: str) -> "tuple[Resume, asyncio.Future[list[Kept]]]":
        """The question to send, and its answer: what is known of every choice, or nothing."""
        self._last_ask += 1
        answer = asyncio.get_running_loop().create_future()
        self._asks[self._last_ask] = _Ask(answer, [])
        number = self._last_ask
        answer.add_done_callback(lambda _: self._asks.pop(number, None))
        return Resume(number, stream, tenant), answer

    def on_kept(self, kept: Kept, now: float) -> None:
        if not kept.ask:
            self._hold(kept, now)
            return
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
        entrusted = [left for choices in self._entrusted.values() for left in choices.values()]
        return [each.kept._replace(age_s=each.kept.age_s + now - each.at) for each in (*self._left, *entrusted)]

    def _hold(self, kept: Kept, now: float) -> None:
        """A stream of another gateway, as it was when it began or changed hands; or the end of its keeping."""
        if not kept.total:
            self._release(kept.stream)
            return
        choices = self._entrusted.setdefault(kept.stream, {})
        former, left = choices.get(kept.choice), _Left(now, kept)
        choices[kept.choice] = left
        self._entrusted_bytes += left.num_bytes - (former.num_bytes if former else 0)
        while self._entrusted_bytes > MAX_BYTES:
            self._release(next(iter(self._entrusted)))

    def _release(self, stream: str) -> None:
        for left in self._entrusted.pop(stream, {}).values():
            self._entrusted_bytes -= left.num_bytes

    def _expire(self, now: float) -> None:
        while self._left and (self._left[0].at + self._grace_s <= now or self._num_bytes > MAX_BYTES):
            self._num_bytes -= self._left.popleft().num_bytes

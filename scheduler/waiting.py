"""The one global queue: every sequence that is bound to no replica. By class; who has started; then by fair share, arrival."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import nsmallest

from scheduler.accounts import Account
from scheduler.sequence import Order, Sequence

WINDOW = 8  # how far a short prompt may look ahead of long ones


def _order(seq: Sequence) -> Order:
    return seq.order


def _turn(queue: list[Sequence]) -> tuple[float, Order]:
    """Of a tenant's queue; the lowest is next."""
    return queue[0].account.share, queue[0].order


class _Line:
    """One priority class."""

    __slots__ = ("fresh", "started")

    def __init__(self) -> None:
        self.started: list[Sequence] = []  # preempted, moved, resumed; in order of arrival
        self.fresh: dict[Account, list[Sequence]] = {}  # never ran; in order of arrival. No list is empty

    def queue_of(self, seq: Sequence) -> list[Sequence]:
        return self.started if seq.begun else self.fresh[seq.account]

    @property
    def head(self) -> Sequence:
        return self.started[0] if self.started else min(self.fresh.values(), key=_turn)[0]


class Waiting:
    __slots__ = ("_all", "_lines", "num_tokens")

    def __init__(self) -> None:
        self._all: dict[Sequence, None] = {}
        self._lines: dict[int, _Line] = {}  # by priority; none is empty
        self.num_tokens = 0  # of all of them; a sequence does not grow while it waits

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._all

    def add(self, seq: Sequence) -> None:
        """A sequence that ran before keeps its order, so it comes back where it was."""
        line = self._lines.setdefault(seq.order[0], _Line())
        account = seq.account
        if not seq.begun and account not in line.fresh:
            account.rejoin()
            line.fresh[account] = []
        insort(line.queue_of(seq), seq, key=_order)
        self._all[seq] = None
        self.num_tokens += len(seq.tokens)
        account.waiting += 1
        account.waiting_tokens += len(seq.tokens)

    def remove(self, seq: Sequence) -> None:
        line, account = self._lines[seq.order[0]], seq.account
        queue = line.queue_of(seq)
        at = bisect_left(queue, seq.order, key=_order)
        assert queue[at] is seq, f"sequence {seq.id} is not waiting"
        del queue[at]
        if not queue and not seq.begun:
            del line.fresh[account]
        if not line.fresh and not line.started:
            del self._lines[seq.order[0]]
        del self._all[seq]
        self.num_tokens -= len(seq.tokens)
        account.waiting -= 1
        account.waiting_tokens -= len(seq.tokens)

    def take(self, seq: Sequence) -> None:
        """It leaves the queue because it will run."""
        if not seq.begun:
            shares = [account.share for account in self._lines[seq.order[0]].fresh]
            seq.account.tier.floor = max(seq.account.tier.floor, min(shares))
        self.remove(seq)

    @property
    def head(self) -> Sequence | None:
        return self._lines[min(self._lines)].head if self._lines else None

    def window(self) -> list[Sequence]:
        """Who may be taken next: of the head's class, the head first.

        A sequence that has started (preempted, moved, resumed) is never overtaken within its class. One that must run alone
        is not in the window; as the head it waits for an empty replica and nobody passes it. Otherwise the window holds the
        first of every tenant, the least served one first, and more of that tenant if there are few others.
        """
        if not self._lines:
            return []
        line = self._lines[min(self._lines)]
        if line.started:
            return [] if line.started[0].alone else line.started[:1]
        queues = nsmallest(WINDOW, line.fresh.values(), key=_turn)
        return [queue[0] for queue in queues] + queues[0][1 : 1 + WINDOW - len(queues)]

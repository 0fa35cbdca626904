"""The one global queue: every sequence that is bound to no replica, in the total order (priority, arrival)."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler.sequence import Order, Sequence

WINDOW = 8  # how far a short prompt may look ahead of long ones


def _order(seq: Sequence) -> Order:
    return seq.order


class Waiting:
    __slots__ = ("_queue", "num_tokens")

    def __init__(self) -> None:
        self._queue: list[Sequence] = []
        self.num_tokens = 0  # of all of them; a sequence does not grow while it waits

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def __contains__(self, seq: Sequence) -> bool:
        at = bisect_left(self._queue, seq.order, key=_order)
        return at < len(self._queue) and self._queue[at] is seq

    def add(self, seq: Sequence) -> None:
        """A sequence that ran before keeps its order, so it comes back where it was."""
        insort(self._queue, seq, key=_order)
        self.num_tokens += len(seq.tokens)

    def remove(self, seq: Sequence) -> None:
        at = bisect_left(self._queue, seq.order, key=_order)
        assert self._queue[at] is seq, f"sequence {seq.id} is not waiting"
        del self._queue[at]
        self.num_tokens -= len(seq.tokens)

    @property
    def head(self) -> Sequence | None:
        return self._queue[0] if self._queue else None

    def window(self) -> list[Sequence]:
        """Who may be taken next: the head's class, in order, up to and including the first that must not be overtaken.

        A sequence that has run already (preempted, moved, resumed) is never overtaken by a younger one of its class. One
        that must run alone is not in the window; as the head it waits for an empty replica and nobody passes it.
        """
        window: list[Sequence] = []
        for seq in self._queue[:WINDOW]:
            if seq.order[0] != self._queue[0].order[0] or seq.alone:
                break
            window.append(seq)
            if seq.started or seq.num_output:
                break
        return window

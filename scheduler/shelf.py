"""Resumable streams: who computes their choices now and, for a grace time, the tokens of those that nobody does.

A gateway that takes a stream over has its ids from here, so it does not matter which gateway had it, or whether that one lives.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.sequence import Sequence
from shared.messages import Finish, Kept

MAX_BYTES = 256 * 2**20  # of what is kept; beyond it the stream that was left first goes first
ENTRY_BYTES = 400  # of one kept choice besides its columns


class _Left(NamedTuple):
    arrived: float  # clock time of the request
    kept: Kept

    @property
    def num_bytes(self) -> int:
        return len(self.kept.tokens) + len(self.kept.ticket) + ENTRY_BYTES


@dataclass(slots=True)
class _Stream:
    tenant: str
    turn: int = 0  # how often it was taken over
    live: dict[int, Sequence] = field(default_factory=dict)  # by choice
    left: dict[int, _Left] = field(default_factory=dict)  # by choice


class Shelf:
    def __init__(self, grace_s: float = 60.0) -> None:
        self._grace_s = grace_s
        self._streams: dict[str, _Stream] = {}
        self._ends: OrderedDict[str, float] = OrderedDict()  # streams without a live choice -> when they are forgotten
        self.now = 0.0  # clock time, as far as it was told
        self.num_bytes = 0

    def __len__(self) -> int:
        """Streams that nobody computes."""
        return len(self._ends)

    def holds(self, stream: str) -> bool:
        return stream in self._streams

    def adopt(self, seq: Sequence, now: float) -> Sequence | None:
        """A sequence came into the queue. Returns the one that nobody waits for: whichever was the same choice until now, or
        seq itself, where its gateway has lost the stream without knowing it yet."""
        self.now = now
        stream = self._streams.setdefault(seq.stream, _Stream(seq.tenant))
        if seq.turn < stream.turn:
            return seq
        stream.turn = seq.turn
        self._ends.pop(seq.stream, None)
        self._drop_left(stream, seq.choice)
        former = stream.live.get(seq.choice)
        stream.live[seq.choice] = seq
        return former

    def keep(self, seq: Sequence, reason: int) -> None:
        """A sequence ended, or its client or gateway left. One whose place another has taken is not kept."""
        stream = self._streams.get(seq.stream)
        if stream is None or stream.live.get(seq.choice) is not seq:
            return
        del stream.live[seq.choice]
        reason = 0 if reason == Finish.ABORT else reason
        tokens, names = seq.tokens.tobytes(), (seq.stream, seq.turn, seq.choice, stream.tenant)
        kept = Kept(0, 0, *names, seq.ticket, tokens, seq.num_prompt, seq.first_cached, reason, 0.0)
        self._put(stream, _Left(seq.order[1], kept))

    def forget(self, seq: Sequence) -> None:
        """A sequence was refused: its stream never began."""
        stream = self._streams.get(seq.stream)
        if stream is not None and stream.live.get(seq.choice) is seq:
            del stream.live[seq.choice]
            self._settle(seq.stream, stream)

    def learn(self, kept: Kept, now: float) -> None:
        """A gateway tells what it kept, because the scheduler before this one knew it. Whoever knows more tokens is right."""
        self.now = now
        stream = self._streams.setdefault(kept.stream, _Stream(kept.tenant))
        stream.turn = max(stream.turn, kept.turn)
        known = stream.left.get(kept.choice)
        if kept.choice in stream.live or (known is not None and len(known.kept.tokens) >= len(kept.tokens)):
            return
        self._drop_left(stream, kept.choice)
        self._put(stream, _Left(now - kept.age_s, kept))

    def take(self, name: str, tenant: str) -> list[Sequence] | None:
        """The live sequences of a stream, to be ended for whoever comes for it; None: this tenant has no such stream."""
        stream = self._streams.get(name)
        if stream is None or stream.tenant != tenant:
            return None
        stream.turn += 1
        return list(stream.live.values())

    def answer(self, ask: int, name: str, now: float) -> list[Kept]:
        """What is known of a stream that has no live choice. It stays here until somebody submits it again."""
        if name not in self._streams:
            return []
        stream = self._streams[name]
        count, turn = len(stream.left), stream.turn
        return [
            each.kept._replace(ask=ask, total=count, turn=turn, age_s=max(0.0, now - each.arrived))
            for each in stream.left.values()
        ]

    def tick(self, now: float) -> None:
        self.now = now
        while self._ends and next(iter(self._ends.values())) <= now:
            self._remove(next(iter(self._ends)))

    def _put(self, stream: _Stream, left: _Left) -> None:
        stream.left[left.kept.choice] = left
        self.num_bytes += left.num_bytes
        self._settle(left.kept.stream, stream)
        while self.num_bytes > MAX_BYTES and self._ends:
            self._remove(next(iter(self._ends)))

    def _settle(self, name: str, stream: _Stream) -> None:
        """Once no choice is live the grace time runs."""
        if stream.live:
            return
        if stream.left:
            self._ends[name] = self.now + self._grace_s
            self._ends.move_to_end(name)
        else:
            del self._streams[name]

    def _drop_left(self, stream: _Stream, choice: int) -> None:
        left = stream.left.pop(choice, None)
        if left is not None:
            self.num_bytes -= left.num_bytes

    def _remove(self, name: str) -> None:
        del self._ends[name]
        stream = self._streams.pop(name)
        for choice in list(stream.left):
            self._drop_left(stream, choice)

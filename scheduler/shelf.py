"""Resumable streams: who computes their choices now and, for a grace time, the tokens of those that nobody does.

A gateway that takes a stream over has its ids from here, so it does not matter which gateway had it, or whether that one lives.
Every stream is entrusted to a second gateway: should its own die together with this process, that one tells the next scheduler.
"""

from collections import OrderedDict
from collections.abc import Mapping
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
    trustee: str = ""  # peer of the gateway that keeps it for the next scheduler; empty: none does

    @property
    def owners(self) -> set[str]:
        """Names of the gateways that compute it."""
        return {seq.outbox.name for seq in self.live.values()}

    def choices(self, now: float) -> list[Kept]:
        live = [_Left(seq.order[1], _kept(seq, self.tenant, 0)) for seq in self.live.values()]
        return [left.kept._replace(age_s=max(0.0, now - left.arrived)) for left in (*live, *self.left.values())]


def _kept(seq: Sequence, tenant: str, reason: int) -> Kept:
    names = (seq.stream, seq.turn, seq.choice, tenant)
    return Kept(0, 1, *names, seq.ticket, seq.tokens.tobytes(), seq.num_prompt, seq.first_cached, reason, 0.0)


def _forget_it(stream: str) -> Kept:
    return Kept(0, 0, stream, 0, 0, "", b"", b"", 0, -1, 0, 0.0)


class Shelf:
    def __init__(self, grace_s: float = 60.0) -> None:
        self._grace_s = grace_s
        self._streams: dict[str, _Stream] = {}
        self._ends: OrderedDict[str, float] = OrderedDict()  # streams without a live choice -> when they are forgotten
        self._unentrusted: dict[str, None] = {}  # streams that no second gateway keeps
        self._ended: list[tuple[str, str]] = []  # (trustee, stream) that need not be kept any longer
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
        stream = self._stream(seq.stream, seq.tenant)
        if seq.turn < stream.turn:
            return seq
        self._unentrusted[seq.stream] = None
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
        self._put(stream, _Left(seq.order[1], _kept(seq, stream.tenant, reason)))

    def forget(self, seq: Sequence) -> None:
        """A sequence was refused: its stream never began."""
        stream = self._streams.get(seq.stream)
        if stream is not None and stream.live.get(seq.choice) is seq:
            del stream.live[seq.choice]
            self._settle(seq.stream, stream)

    def learn(self, kept: Kept, peer: str, now: float) -> None:
        """A gateway tells what it kept, because the scheduler before this one knew it. Whoever knows more tokens is right."""
        self.now = now
        stream = self._stream(kept.stream, kept.tenant)
        stream.trustee = stream.trustee or peer
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

    def entrust(self, gateways: Mapping[str, str]) -> list[tuple[str, Kept]]:
        """What gateways (peer -> name) are to keep for the scheduler after this one, or to forget (total 0)."""
        ended, self._ended = self._ended, []
        out = [(peer, _forget_it(name)) for peer, name in ended if peer in gateways]
        if len(set(gateways.values())) < 2:
            return out
        for name in list(self._unentrusted):
            stream = self._streams[name]
            others = [peer for peer, gateway in gateways.items() if gateway not in stream.owners]
            if not others:
                continue
            if stream.trustee not in others:
                out += [(stream.trustee, _forget_it(name))] if stream.trustee else []
                stream.trustee = others[len(self._streams) % len(others)]
            out += [(stream.trustee, kept) for kept in stream.choices(self.now)]
            del self._unentrusted[name]
        return out

    def lose(self, peer: str) -> None:
        """A gateway is gone: what was entrusted to it needs another."""
        for name, stream in self._streams.items():
            if stream.trustee == peer:
                stream.trustee = ""
                self._unentrusted[name] = None

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
            self._forget(name)

    def _stream(self, name: str, tenant: str) -> _Stream:
        if name not in self._streams:
            self._streams[name] = _Stream(tenant)
        return self._streams[name]

    def _forget(self, name: str) -> None:
        stream = self._streams.pop(name)
        self._unentrusted.pop(name, None)
        if stream.trustee:
            self._ended.append((stream.trustee, name))
        for choice in list(stream.left):
            self._drop_left(stream, choice)

    def _drop_left(self, stream: _Stream, choice: int) -> None:
        left = stream.left.pop(choice, None)
        if left is not None:
            self.num_bytes -= left.num_bytes

    def _remove(self, name: str) -> None:
        del self._ends[name]
        self._forget(name)

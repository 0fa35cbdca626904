"""Builds the columns of one StepPlan and the record its results will be matched with."""

import struct
from array import array
from typing import NamedTuple

from scheduler.prefix_index import UNKNOWN
from scheduler.replica import DecodeRows, Flight, Replica, Score
from scheduler.sequence import Sequence
from shared.messages import StepPlan
from shared.sampling import EDIT_BYTES

_OPEN = struct.Struct("<ii")
_REGISTRATION = struct.Struct("<i16s")

NO_ROWS = DecodeRows([], [], [], b"", b"")

CRUMB_SHARE = 8  # a piece of at most this part of what goes with it is not worth a cut


class PrefillRow(NamedTuple):
    sequence: Sequence
    start: int  # first token, an index into the known ones
    num_tokens: int
    sampled: bool  # it ends the prefill and the sequence wants output


class PlanBuilder:
    """A plan being made: what it changes and how much more it can carry. Only what is bound at the end goes into it."""

    __slots__ = ("budget", "crowded", "grown", "opened", "prefills", "replica", "room")

    def __init__(self, replica: Replica, budget: int) -> None:
        self.replica = replica
        self.budget = budget  # prefill tokens it should still take
        self.room = budget  # and those that it can
        self.crowded = False  # so much waits that the time for all of it counts, not that of one step
        self.opened: list[Sequence] = []
        self.grown: list[tuple[Sequence, int, int]] = []  # (sequence, generation, index in its pages)
        self.prefills: list[PrefillRow] = []

    def piece(self, num_tokens: int) -> int:
        """How many of a prefill's num_tokens this plan takes; 0: none, it had better wait for the next.

        Two pieces take longer than the whole: the keys of the first are read from their pages. So a small rest comes along
        (within room), in a crowd one half as large again as the piece, and what would begin with a crumb behind other
        prefills waits.
        """
        rest = self.budget * 3 // 2 if self.crowded else self.budget // CRUMB_SHARE
        if num_tokens <= min(self.budget + rest, self.room):
            return num_tokens
        taken = sum(row.num_tokens for row in self.prefills)
        return 0 if self.budget < taken // CRUMB_SHARE else min(num_tokens, self.budget)

    def add_prefill(self, seq: Sequence) -> None:
        """The next tokens of its prefill. Its full pages can be shared from now on, also in this plan."""
        count = self.piece(seq.prefill_left)
        if count == 0:
            self.budget = 0
            return
        self.prefills.append(PrefillRow(seq, seq.computed, count, count == seq.prefill_left and seq.max_new > 0))
        self.budget -= count
        self.room -= count
        seq.charge_prefill(seq.computed, seq.computed + count)
        seq.computed += count
        self.replica.register(seq, seq.computed)

    def build(self, step: int, decode: DecodeRows) -> StepPlan:
        """The message; its record is in flight from now on."""
        replica = self.replica
        if not self.prefills:
            return self._build_decode(step, decode)
        chunks = [row for row in self.prefills if not row.sampled]
        lasts = [row for row in self.prefills if row.sampled]
        rows = chunks + lasts
        row_slots = array("i", [row.sequence.slot for row in rows])
        tokens = array("i")
        for row in rows:
            tokens.extend(row.sequence.tokens[row.start : row.start + row.num_tokens])
        edit_counts, edits = self._edits()
        history_counts, history = self._history()
        positions, targets, scores, score_width = self._scores(rows)
        news, registrations = self._registrations()
        plan = StepPlan(
            step=step,
            num_chunk=len(chunks),
            num_last=len(lasts),
            num_decode=len(decode.sequences),
            row_slots=row_slots.tobytes() + decode.slots,
            row_lens=array("i", [row.num_tokens for row in rows]).tobytes(),
            tokens=tokens.tobytes(),
            page_writes=self._page_writes(),
            opens=b"".join([_OPEN.pack(seq.slot, seq.num_cached) + seq.sampling for seq in self.opened]),
            edit_counts=edit_counts,
            edits=edits,
            history_counts=history_counts,
            history=history,
            registrations=registrations,
            page_copies=b"",
            score_positions=positions.tobytes(),
            score_targets=targets.tobytes(),
            score_width=score_width,
            group_counts=decode.group_counts,
            opened=" ".join([seq.request for seq in self.opened if seq.request]),
        )
        flight = Flight(
            step,
            [*[row.sequence for row in lasts], *decode.sequences],
            [*[row.sequence.generation for row in lasts], *decode.generations],
            [*[(row.sequence.account, 1) for row in lasts], *decode.tally],
            [(row.sequence, row.sequence.generation) for row in chunks],
            [(row.sequence, row.sequence.generation) for row in chunks if row.sequence.prefill_left == 0],
            scores,
            news,
            len(tokens),
            len(decode.sequences),
        )
        replica.in_flight.append(flight)
        return plan

    def _build_decode(self, step: int, decode: DecodeRows) -> StepPlan:
        """The steady state: nothing but decode rows, and now and then a page."""
        news, registrations = self._registrations()
        plan = StepPlan(
            step,
            0,
            0,
            len(decode.sequences),
            decode.slots,
            b"",
            b"",
            self._page_writes(),
            b"",
            b"",
            b"",
            b"",
            b"",
            registrations,
            b"",
            b"",
            b"",
            0,
            decode.group_counts,
        )
        num_decode = len(decode.sequences)
        flight = Flight(step, decode.sequences, decode.generations, decode.tally, [], [], [], news, 0, num_decode)
        self.replica.in_flight.append(flight)
        return plan

    def _page_writes(self) -> bytes:
        writes = array("i")
        for seq in self.opened:
            for at, page in enumerate(seq.pages):
                writes.extend((seq.slot, at, page))
        for seq, generation, at in self.grown:
            if seq.generation == generation:
                writes.extend((seq.slot, at, seq.pages[at]))
        return writes.tobytes()

    def _edits(self) -> tuple[bytes, bytes]:
        edited = [seq for seq in self.opened if seq.edits]
        counts = array("i")
        for seq in edited:
            counts.extend((seq.slot, len(seq.edits) // EDIT_BYTES))
        return counts.tobytes(), b"".join([seq.edits for seq in edited])

    def _history(self) -> tuple[bytes, bytes]:
        """All known ids of a reopened slot; what it samples from here on the worker adds itself."""
        remembering = [seq for seq in self.opened if seq.needs_history]
        counts = array("i")
        for seq in remembering:
            counts.extend((seq.slot, 0, len(seq.tokens)))
        return counts.tobytes(), b"".join([seq.tokens.tobytes() for seq in remembering])

    def _registrations(self) -> tuple[set[int], bytes]:
        news = self.replica.pool.index.take_news()
        if not news:
            return set(), b""
        column = b"".join([_REGISTRATION.pack(page, page_hash) for page, page_hash in news.items()])
        return {page for page, page_hash in news.items() if page_hash != UNKNOWN}, column

    def _scores(self, rows: list[PrefillRow]) -> tuple["array[int]", "array[int]", list[Score], int]:
        positions, targets = array("i"), array("i")
        scores: list[Score] = []
        width = offset = 0
        for row in rows:
            seq = row.sequence
            # Position p says how likely token p + 1 is.
            first = max(row.start + 1, seq.scored)
            after = min(row.start + row.num_tokens + 1, seq.num_prompt)
            if seq.score_width >= 0 and first < after:
                positions.extend(range(offset + first - 1 - row.start, offset + after - 1 - row.start))
                targets.extend(seq.tokens[first:after])
                scores.append(Score(seq, seq.generation, first, after - first))
                width = max(width, seq.score_width)
            offset += row.num_tokens
        return positions, targets, scores, width

"""A worker without a device: its KV cells remember the hash of their whole prefix, its tokens are hashes of what is read.

A wrong page, a stale slot, an early free, a lost delta or a plan out of order changes the text. What cannot change the text
(writing into a page others may read) raises ProtocolViolation. It is told nothing about sequences: slots, pages, order.
"""

import math
import secrets
import struct
from collections import deque

from shared.columns import f32, i32, read_i32
from shared.messages import PROTOCOL, StepDone, StepPlan, WorkerHello
from shared.sampling import Flag, Sampling, unpack_edits

UNKNOWN = bytes(16)
VOCABULARY = 13

Edits = tuple[tuple[int, float, int], ...]


class ProtocolViolation(Exception):
    """A plan that no worker must ever be sent."""


def cell_hash(previous: int, token: int) -> int:
    return hash((previous, token))  # hashes of integers are the same in every process


def sample(prefix: int, seed: int, position: int, edits: Edits, history: int) -> int:
    """The token a slot samples at this position; -1 when an edit allows nothing."""
    if any(token == 0 and value == -math.inf for token, value, _ in edits):
        return -1
    return hash((prefix, seed, position, edits, history)) % VOCABULARY


def active_edits(edits: Edits, output_index: int) -> Edits:
    return tuple(edit for edit in edits if output_index < edit[2])


def score(prefix: int, target: int) -> float:
    """Log-probability of target after this prefix."""
    return -(hash((prefix, target, 5)) % 1000) / 8


def top(prefix: int, width: int) -> tuple[list[int], list[float]]:
    ids = [hash((prefix, rank, 6)) % VOCABULARY for rank in range(width)]
    return ids, [-(hash((prefix, rank, 7)) % 1000) / 8 for rank in range(width)]


class FakeWorker:
    def __init__(
        self, replica: str, *, page_tokens: int, num_pages: int, num_slots: int, max_batched: int, max_len: int
    ) -> None:
        self.replica = replica
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.max_batched = max_batched
        self.max_len = max_len
        self.cells: list[int | None] = [None] * (num_pages * page_tokens)
        self.ids = [0] * (num_pages * page_tokens)  # token of every cell
        self.tables: list[dict[int, int]] = [{} for _ in range(num_slots)]
        self.lengths = [0] * num_slots
        self.lasts: list[int | None] = [None] * num_slots
        self.samplings = [Sampling()] * num_slots
        self.edits: list[Edits] = [()] * num_slots
        self.histories: list[dict[int, int]] = [{} for _ in range(num_slots)]
        self.inventory: dict[int, bytes] = {}  # pages of finished plans
        self.inbox: deque[StepPlan] = deque()
        self._process = secrets.randbits(62)
        self.last_step = 0
        self._row_starts: dict[int, int] = {}  # of the plan that runs, by slot
        self._scored: list[tuple[int, int]] = []  # (slot, position) of its score positions

    def hello(self, model: str = "m") -> WorkerHello:
        self.last_step = 0
        column = b"".join(struct.pack("<i16s", page, page_hash) for page, page_hash in self.inventory.items())
        return WorkerHello(
            PROTOCOL,
            self.replica,
            0,
            1,
            0,
            model,
            self.page_tokens,
            self.num_pages,
            self.num_slots,
            self.max_batched,
            self.max_len,
            column,
            self._process,
        )

    def fail(self, how_far: float) -> int:
        """The oldest plan fails after part of its rows were written, the others are forgotten. Returns its step."""
        plan = self.inbox.popleft()
        self.inbox.clear()
        self._apply(plan)
        rows = self._rows(plan)
        self._write(rows[: int(len(rows) * how_far)])
        return plan.step

    def run(self) -> StepDone:
        """Execute the oldest plan."""
        plan = self.inbox.popleft()
        if plan.step <= self.last_step:
            raise ProtocolViolation(f"step {plan.step} after step {self.last_step}")
        self.last_step = plan.step
        self._apply(plan)
        rows = self._rows(plan)
        self._write(rows)
        self._check_groups(plan)
        sampled = list(read_i32(plan.row_slots))[plan.num_chunk :]
        prefixes = [self._prefix(slot) for slot in sampled]
        tokens = [self._sample(slot, prefix) for slot, prefix in zip(sampled, prefixes, strict=True)]
        for page, page_hash in _registrations(plan):
            if page_hash != UNKNOWN:
                self.inventory[page] = page_hash
        return self._done(plan, sampled, prefixes, tokens)

    # --- what a plan does, in its order ---------------------------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        for page, _ in _registrations(plan):
            self.inventory.pop(page, None)
        for at in range(0, len(plan.opens), 64):
            slot, computed = struct.unpack_from("<ii", plan.opens, at)
            if not 0 < slot < self.num_slots:
                raise ProtocolViolation(f"slot {slot}")
            self.lengths[slot] = computed
            self.lasts[slot] = None
            self.samplings[slot] = Sampling.unpack(plan.opens[at + 8 : at + 64])
            self.edits[slot] = ()
            self.histories[slot] = {}
        edits = unpack_edits(plan.edits)
        for slot, count in _records(plan.edit_counts, 2):
            self.edits[slot] = tuple(edits[:count])
            del edits[:count]
        history = read_i32(plan.history).tolist()
        for slot, first, count in _records(plan.history_counts, 3):
            for number in range(count):
                self.histories[slot][first + number] = history.pop(0)
        for slot, at, page in _records(plan.page_writes, 3):
            if not 0 < page < self.num_pages or not 0 < slot < self.num_slots:
                raise ProtocolViolation(f"page write {slot, at, page}")
            self.tables[slot][at] = page

    def _rows(self, plan: StepPlan) -> list[tuple[int, list[int]]]:
        """(slot, input tokens) of every row; lengths grow."""
        slots, lens, tokens = list(read_i32(plan.row_slots)), list(read_i32(plan.row_lens)), list(read_i32(plan.tokens))
        if len(set(slots)) != len(slots) or len(slots) != plan.num_chunk + plan.num_last + plan.num_decode:
            raise ProtocolViolation(f"row slots {slots}")
        if sum(lens) + plan.num_decode > self.max_batched or sum(lens) != len(tokens) or any(count < 1 for count in lens):
            raise ProtocolViolation(f"row lengths {lens}, {plan.num_decode} decode rows")
        self._row_starts = {}
        rows: list[tuple[int, list[int]]] = []
        for slot, count in zip(slots, lens + [1] * plan.num_decode, strict=True):
            if len(rows) < len(lens):
                inputs, tokens = tokens[:count], tokens[count:]
            else:
                last = self.lasts[slot]
                if last is None:
                    raise ProtocolViolation(f"decode row of slot {slot}, which has sampled nothing since it was opened")
                inputs = [last]
            self._row_starts[slot] = self.lengths[slot]
            self.lengths[slot] += len(inputs)
            if self.lengths[slot] > self.max_len:
                raise ProtocolViolation(f"slot {slot} has length {self.lengths[slot]}")
            rows.append((slot, inputs))
        self._score_reads(plan, rows)
        return rows

    def _score_reads(self, plan: StepPlan, rows: list[tuple[int, list[int]]]) -> None:
        places = [(slot, self._row_starts[slot] + at) for slot, inputs in rows for at in range(len(inputs))]
        self._scored = [places[position] for position in read_i32(plan.score_positions)]

    def _cell(self, slot: int, position: int) -> int:
        page = self.tables[slot].get(position // self.page_tokens)
        if page is None:
            raise ProtocolViolation(f"slot {slot} has no page for position {position}")
        return page * self.page_tokens + position % self.page_tokens

    def _write(self, rows: list[tuple[int, list[int]]]) -> None:
        """All rows of a step write before any reads, layer by layer: a row may read what another row of the step writes."""
        writes: dict[int, tuple[int | None, int]] = {}  # cell -> (cell before it, token)
        for slot, inputs in rows:
            for number, token in enumerate(inputs):
                position = self._row_starts[slot] + number
                cell = self._cell(slot, position)
                if cell in writes:
                    raise ProtocolViolation(f"two rows write cell {cell}")
                if cell // self.page_tokens in self.inventory:
                    raise ProtocolViolation(f"slot {slot} writes into page {cell // self.page_tokens}, which others may read")
                writes[cell] = (self._cell(slot, position - 1) if position else None, token)
        while writes:
            chain = [next(iter(writes))]
            while (before := writes[chain[-1]][0]) in writes:  # follow the prefix down to what is known
                assert before is not None
                chain.append(before)
            for cell in reversed(chain):
                before, token = writes.pop(cell)
                previous = 0 if before is None else self.cells[before]
                self.cells[cell] = cell_hash(-1 if previous is None else previous, token)
                self.ids[cell] = token

    def _prefix(self, slot: int) -> int:
        value = self.cells[self._cell(slot, self.lengths[slot] - 1)]
        return -1 if value is None else value

    def known(self, slot: int) -> list[int]:
        """The tokens this slot attends to, as its page table shows them."""
        return [self.ids[self._cell(slot, position)] for position in range(self.lengths[slot])]

    def _sample(self, slot: int, prefix: int) -> int:
        sampling, position = self.samplings[slot], self.lengths[slot]
        history = 0
        if sampling.flags & Flag.NEEDS_HISTORY:
            history = hash(tuple(self.histories[slot].get(at, -1) for at in range(position)))
        token = sample(prefix, sampling.seed, position, active_edits(self.edits[slot], position - sampling.num_prompt), history)
        self.lasts[slot] = token
        self.histories[slot][position] = token
        return token

    def _check_groups(self, plan: StepPlan) -> None:
        slots = list(read_i32(plan.row_slots))[plan.num_chunk + plan.num_last :]
        for count, shared in _records(plan.group_counts, 2):
            members, slots = slots[:count], slots[count:]
            tables = [[self.tables[slot].get(at) for at in range(shared)] for slot in members]
            if count < 2 or shared < 1 or len(members) < count or any(table != tables[0] for table in tables):
                raise ProtocolViolation(f"group of slots {members} does not share {shared} pages")
            if any(self.lengths[slot] < shared * self.page_tokens for slot in members):
                raise ProtocolViolation(f"group of slots {members} is shorter than {shared} pages")

    # --- results --------------------------------------------------------------------------------------------------------

    def _done(self, plan: StepPlan, sampled: list[int], prefixes: list[int], tokens: list[int]) -> StepDone:
        asked = [self.samplings[slot].logprobs for slot in sampled]
        width = max(asked, default=-1)
        logprobs, top_ids, top_logprobs = [], [], []
        for prefix, token, wanted in zip(prefixes, tokens, asked, strict=True):
            logprobs.append(score(prefix, token) if wanted >= 0 else math.nan)
            ids, values = top(prefix, max(wanted, 0))
            top_ids += ids + [0] * (max(width, 0) - len(ids))
            top_logprobs += values + [-math.inf] * (max(width, 0) - len(values))
        read = [self.cells[self._cell(slot, position)] for slot, position in self._scored]
        scores = [score(prefix or 0, target) for prefix, target in zip(read, read_i32(plan.score_targets), strict=True)]
        tops = [top(prefix or 0, plan.score_width) for prefix in read]
        return StepDone(
            plan.step,
            i32(tokens),
            f32(logprobs) if width >= 0 else b"",
            max(width, 0),
            i32(top_ids) if width >= 0 else b"",
            f32(top_logprobs) if width >= 0 else b"",
            f32(scores),
            plan.score_width if scores else 0,
            i32(each for ids, _ in tops for each in ids),
            f32(each for _, values in tops for each in values),
            0,
        )


def _records(column: bytes, width: int) -> list[tuple[int, ...]]:
    values = read_i32(column).tolist()
    return [tuple(values[at : at + width]) for at in range(0, len(values), width)]


def _registrations(plan: StepPlan) -> list[tuple[int, bytes]]:
    return list(struct.iter_unpack("<i16s", plan.registrations))


def reference(
    prompt: list[int], end_len: int, sampling: Sampling, edits: Edits, stop_ids: frozenset[int], min_new: int
) -> tuple[list[int], bool]:
    """Output of one sequence computed by itself, and whether it ended with an error."""
    prefix = 0
    for token in prompt:
        prefix = cell_hash(prefix, token)
    known = list(prompt)
    while len(known) < end_len:
        position = len(known)
        history = hash(tuple(known)) if sampling.flags & Flag.NEEDS_HISTORY else 0
        token = sample(prefix, sampling.seed, position, active_edits(edits, position - len(prompt)), history)
        if token < 0:
            return known[len(prompt) :], True
        known.append(token)
        if token in stop_ids and position - len(prompt) >= min_new:
            break
        prefix = cell_hash(prefix, token)
    return known[len(prompt) :], False

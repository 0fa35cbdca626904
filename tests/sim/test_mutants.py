"""Every rule of the step protocol is broken once, and some history notices."""

from collections.abc import Callable
from typing import Any

import pytest

from scheduler import commit, groups, planner, workers
from scheduler.cell import Cell
from scheduler.page_pool import PagePool
from scheduler.plan import PlanBuilder
from scheduler.prefix_index import PrefixIndex
from scheduler.replica import DecodeRows, Replica
from scheduler.sequence import Sequence
from shared.columns import i32
from shared.messages import StepPlan
from tests.sim.fake_worker import FakeWorker, _records
from tests.sim.world import World

SEEDS = 150
Patch = pytest.MonkeyPatch


def duplicate_page_is_replaced_without_telling_the_worker(patch: Patch) -> None:
    def register(self: Replica, seq: Sequence, num_tokens: int) -> None:
        count = num_tokens // self.page_tokens
        hashes = seq.hash_pages(count, self.hash_key, self.page_tokens)
        index = self.pool.index
        for at in range(seq.num_registered, count):
            page, known = seq.pages[at], index.page_of.get(hashes[at])
            if known is None:
                index.add(page, hashes[at])
            elif known != page:
                self.pool.drop([page])
                self.pool.share([known])
                seq.pages[at] = known
            seq.num_registered = at + 1
        self._set_events(seq)

    patch.setattr(Replica, "register", register)


def page_table_is_edited_outside_plan_order(patch: Patch) -> None:
    original = World._to_worker

    def to_worker(self: World, peer: str, message: Any) -> None:
        if isinstance(message, StepPlan):
            for slot, at, page in _records(message.page_writes, 3):
                self.workers[peer].tables[slot][at] = page
        original(self, peer, message)

    patch.setattr(World, "_to_worker", to_worker)


def results_are_matched_without_generation(patch: Patch) -> None:
    def unbind(self: Sequence) -> None:
        self._unbind()

    patch.setattr(Sequence, "unbind", unbind)


def release_frees_the_slot_twice(patch: Patch) -> None:
    original = Replica.release

    def release(self: Replica, seq: Sequence) -> None:
        slot = seq.slot
        original(self, seq)
        self.slots.append(slot)

    patch.setattr(Replica, "release", release)


def release_frees_a_page_twice(patch: Patch) -> None:
    original = PagePool.drop

    def drop(self: PagePool, pages: list[int]) -> None:
        original(self, pages)
        if len(pages) > 2 and self.refs[pages[-1]] == 0 and pages[-1] not in self.index.hash_of:
            self.free.append(pages[-1])

    patch.setattr(PagePool, "drop", drop)


def decode_page_is_indexed_before_its_last_cell_is_written(patch: Patch) -> None:
    original_look, original_events = commit._look, Replica._set_events

    def look(cell: Cell, replica: Replica, seq: Sequence, token: int) -> None:
        if token >= 0:
            replica.register(seq, min(len(seq.tokens), len(seq.pages) * replica.page_tokens))
        original_look(cell, replica, seq, token)

    def set_events(self: Replica, seq: Sequence) -> None:
        original_events(self, seq)
        seq.check_at -= 1

    patch.setattr(commit, "_look", look)
    patch.setattr(Replica, "_set_events", set_events)


def prompt_is_indexed_before_its_chunk_is_dispatched(patch: Patch) -> None:
    original = Replica.bind

    def bind(self: Replica, seq: Sequence, matched: list[int]) -> None:
        original(self, seq, matched)
        self.register(seq, seq.prefill_len)

    patch.setattr(Replica, "bind", bind)


def cached_prompt_writes_its_last_token_into_a_shared_page(patch: Patch) -> None:
    original = Replica.bind

    def match(self: Replica, seq: Sequence) -> list[int]:
        if seq.score_width >= 0:
            return []
        limit = len(seq.tokens) // self.page_tokens
        return self.pool.index.match(seq.hash_pages(limit, self.hash_key, self.page_tokens), limit)

    def bind(self: Replica, seq: Sequence, matched: list[int]) -> None:
        original(self, seq, matched)
        seq.num_cached = seq.computed = min(seq.computed, len(seq.tokens) - 1)

    patch.setattr(Replica, "match", match)
    patch.setattr(Replica, "bind", bind)


def edits_are_not_sent_again(patch: Patch) -> None:
    original = PlanBuilder._edits

    def edits(self: PlanBuilder) -> tuple[bytes, bytes]:
        opened, self.opened = self.opened, [seq for seq in self.opened if seq.generation == 0]
        columns = original(self)
        self.opened = opened
        return columns

    patch.setattr(PlanBuilder, "_edits", edits)


def history_is_not_sent_again(patch: Patch) -> None:
    original = PlanBuilder._history

    def history(self: PlanBuilder) -> tuple[bytes, bytes]:
        opened, self.opened = self.opened, [seq for seq in self.opened if seq.generation == 0]
        columns = original(self)
        self.opened = opened
        return columns

    patch.setattr(PlanBuilder, "_history", history)


def credits_are_ignored(patch: Patch) -> None:
    original = Replica.__init__

    def init(self: Replica, hellos: Any, peers: Any, hash_key: bytes, credits: int, now: float) -> None:
        original(self, hellos, peers, hash_key, credits + 1, now)

    patch.setattr(Replica, "__init__", init)


def group_claims_a_page_too_many(patch: Patch) -> None:
    original = groups.num_shared

    patch.setattr(groups, "MIN_SHARED_PAGES", 2)
    patch.setattr(groups, "num_shared", lambda first, other, limit: original(first, other, limit) + 1)


def evicted_page_is_not_forgotten_by_the_worker(patch: Patch) -> None:
    original = PrefixIndex.forget

    def forget(self: PrefixIndex, page: int) -> None:
        original(self, page)
        del self.news[page]

    patch.setattr(PrefixIndex, "forget", forget)


def pages_of_a_failed_step_come_back(patch: Patch) -> None:
    """The worker's inventory names what it should have written, and the scheduler believes all of it."""
    original = FakeWorker._apply

    def apply(self: FakeWorker, message: StepPlan) -> None:
        original(self, message)
        for at in range(0, len(message.registrations), 20):
            if any(message.registrations[at + 4 : at + 20]):
                page = int.from_bytes(message.registrations[at : at + 4], "little")
                self.inventory[page] = message.registrations[at + 4 : at + 20]

    def write(self: FakeWorker, rows: Any) -> None:
        kept, self.inventory = self.inventory, {}  # such a worker does not notice either
        original_write(self, rows)
        self.inventory = kept

    original_write = FakeWorker._write
    patch.setattr(FakeWorker, "_apply", apply)
    patch.setattr(FakeWorker, "_write", write)
    patch.setattr(Replica, "acknowledged", lambda self: dict(self.pool.index.hash_of))


def unbelieved_inventory_is_not_forgotten_by_the_worker(patch: Patch) -> None:
    original = PagePool.restore

    def restore(self: PagePool, inventory: Any, trusted: Any) -> None:
        original(self, inventory, trusted)
        self.index.news = {}

    patch.setattr(PagePool, "restore", restore)


def shared_page_stays_evictable(patch: Patch) -> None:
    def share(self: PagePool, pages: Any) -> None:
        for page in pages:
            self.refs[page] += 1

    patch.setattr(PagePool, "share", share)


def preempted_sequence_keeps_its_row(patch: Patch) -> None:
    def leave_decoding(self: Replica, seq: Sequence) -> None:
        self.decoding.pop(seq, None)

    patch.setattr(Replica, "leave_decoding", leave_decoding)


def page_of_a_preempted_sequence_is_still_written(patch: Patch) -> None:
    """The victim's slot may be opened in the same plan, then its old page lands in the table of the new sequence."""
    original = PlanBuilder._page_writes

    def page_writes(self: PlanBuilder) -> bytes:
        column = original(self)
        for seq, generation, at in self.grown:
            if seq.generation != generation:
                slot = self.replica.slots[-1] if self.replica.slots else self.opened[-1].slot
                column += i32((slot, at, 1))
                slot = self.opened[-1].slot if self.opened else slot
                column += i32((slot, 0, 1))
        return column

    patch.setattr(PlanBuilder, "_page_writes", page_writes)


def parked_sequence_is_planned_on(patch: Patch) -> None:
    """More sampled rows in flight than output tokens left."""
    original = Replica._set_events

    def set_events(self: Replica, seq: Sequence) -> None:
        original(self, seq)
        if seq.event_at == seq.end_len:
            seq.event_at += 3

    patch.setattr(Replica, "_set_events", set_events)


def group_order_and_slots_disagree(patch: Patch) -> None:
    original = Replica.decode_rows

    def decode_rows(self: Replica) -> DecodeRows:
        rows = original(self)
        return rows._replace(sequences=rows.sequences[::-1], generations=rows.generations[::-1])

    patch.setattr(Replica, "decode_rows", decode_rows)


def logprobs_of_other_rows(patch: Patch) -> None:
    original = commit._rows_by_gateway

    def rows_by_gateway(flight: Any, done: Any) -> Any:
        return {outbox: list(range(len(rows))) for outbox, rows in original(flight, done).items()}

    patch.setattr(commit, "_rows_by_gateway", rows_by_gateway)


def scored_prompt_reads_the_cache(patch: Patch) -> None:
    def match(self: Replica, seq: Sequence) -> list[int]:
        limit = (len(seq.tokens) - 1) // self.page_tokens
        return self.pool.index.match(seq.hash_pages(limit, self.hash_key, self.page_tokens), limit)

    patch.setattr(Replica, "match", match)


def lost_replica_keeps_its_sequences(patch: Patch) -> None:
    original = workers.Workers.drop

    def drop(self: workers.Workers, replica: Replica, *args: Any, **kwargs: Any) -> Any:
        if len(replica.running) > 1:
            replica.running.popitem()
        return original(self, replica, *args, **kwargs)

    patch.setattr(workers.Workers, "drop", drop)


def start_is_reported_at_every_bind(patch: Patch) -> None:
    original = planner._bind

    def bind(cell: Cell, seq: Sequence, *args: Any) -> None:
        seq.started = False
        original(cell, seq, *args)

    patch.setattr(planner, "_bind", bind)


MUTANTS: list[Callable[[Patch], None]] = [
    value for name, value in list(globals().items()) if callable(value) and getattr(value, "__module__", "") == __name__
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_broken_rule_is_noticed(mutant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MIN_SHARED_PAGES", 2)
    mutant(monkeypatch)
    for seed in range(SEEDS):
        try:
            World(seed).run()
        except Exception:
            return
    pytest.fail(f"{SEEDS} histories with a broken rule ({mutant.__name__}) all looked right")

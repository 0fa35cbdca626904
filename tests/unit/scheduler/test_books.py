"""Pages, index, queue and audit by themselves, driven by random operations; and the numbers on /metrics (B43, S44)."""

import gc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from scheduler import audit
from scheduler.forecast import OutputLengths
from scheduler.groups import arrange, num_shared
from scheduler.metrics import CellCollector
from scheduler.page_pool import PagePool
from scheduler.prefix_index import UNKNOWN, PrefixIndex
from shared.columns import i32, read_i32
from shared.messages import Drain, Finish, StepDone
from tests.unit.scheduler.cells import SmallCell

OPERATIONS = st.lists(st.tuples(st.sampled_from(["take", "index", "share", "drop"]), st.integers(0, 2**16)), max_size=120)


@settings(max_examples=150)
@given(OPERATIONS, st.integers(2, 9))
def test_every_page_is_free_cached_or_held(operations: list[tuple[str, int]], num_pages: int) -> None:
    """Owners are modelled by a list of page lists; the worker's knowledge by the news."""
    pool = PagePool(num_pages, PrefixIndex())
    owners: list[list[int]] = []
    told: dict[int, bytes] = {}
    for serial, (operation, number) in enumerate(operations):
        match operation:
            case "take" if pool.available:
                owners.append([pool.take()])
            case "index" if owners:
                page = owners[number % len(owners)][0]
                if page not in pool.index.hash_of:
                    pool.index.add(page, serial.to_bytes(16, "big"))
            case "share" if pool.index.hash_of:
                page = sorted(pool.index.hash_of)[number % len(pool.index.hash_of)]
                pool.share([page])
                owners.append([page])
            case "drop" if owners:
                pool.drop(owners.pop(number % len(owners)))
        told.update(pool.index.take_news())
        held = Counter(page for pages in owners for page in pages)
        assert pool.refs == [held.get(page, 0) for page in range(num_pages)]
        assert sorted([*pool.free, *pool.cached, *held]) == list(range(1, num_pages))
        assert set(pool.cached) <= set(pool.index.hash_of) and not set(pool.free) & set(pool.index.hash_of)
        known = {page: page_hash for page, page_hash in told.items() if page_hash != UNKNOWN}
        assert known == pool.index.hash_of, "the worker's inventory follows the index"


def test_tail_of_a_prompt_is_evicted_before_its_head() -> None:
    pool = PagePool(5, PrefixIndex())
    pages = [pool.take() for _ in range(4)]
    for page in pages:
        pool.index.add(page, bytes([page]) * 16)
    pool.drop(pages)
    assert [pool.take() for _ in range(4)] == pages[::-1]


def test_least_recently_used_is_evicted_first() -> None:
    pool = PagePool(4, PrefixIndex())
    pages = [pool.take() for _ in range(3)]
    for page in pages:
        pool.index.add(page, bytes([page]) * 16)
        pool.drop([page])
    pool.share([pages[0]])
    pool.drop([pages[0]])
    assert [pool.take() for _ in range(3)] == [pages[1], pages[2], pages[0]]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 40), st.integers(0, 12))
def test_bisection_counts_shared_pages(head: list[int], length: int, tail: int) -> None:
    first = [*range(1, length + 1), *range(100, 100 + tail)]
    other = [*range(1, length + 1), *range(200, 200 + len(head))]
    assert num_shared(first, other, 1000) == length
    assert num_shared(first, other, 5) == min(5, length)


def test_no_rows_make_no_groups() -> None:
    assert arrange([]) == ([], b"")


def test_forecast_learns_from_finished_outputs() -> None:
    small = SmallCell()
    small.submit(1, [1], max_new=4000)
    seq = small.seq(1)
    lengths = OutputLengths()
    before = lengths.remaining(seq)
    for _ in range(300):
        lengths.add(30)
    assert lengths.remaining(seq) == 30 < before
    seq.tokens.extend([1] * 50)  # longer than all before: it is expected to double
    assert lengths.remaining(seq) == 50
    seq.end_len = 60
    assert lengths.remaining(seq) == 9


@pytest.mark.parametrize("damage", ["ref", "free twice", "lost page", "slot twice", "index", "cached unknown", "reserve"])
def test_audit_notices_and_repairs(damage: str) -> None:
    small = SmallCell()
    small.join()
    small.submit(1, list(range(9)), max_new=1)
    small.run()
    small.submit(2, list(range(9)), max_new=30)
    small.answer()
    replica = small.replica()
    pool = replica.pool
    assert audit.violations(replica) == []
    match damage:
        case "ref":
            pool.refs[small.seq(2).pages[0]] += 1
        case "free twice":
            pool.free.append(small.seq(2).pages[-1])
        case "lost page":
            pool.free.pop()
        case "slot twice":
            replica.slots.append(small.seq(2).slot)
        case "index":
            page_hash = next(iter(pool.index.page_of))
            pool.index.page_of[page_hash] = pool.free[0]
        case "cached unknown":
            pool.cached[pool.free.pop()] = None
        case "reserve":
            replica.worst_pages += 1
    assert audit.audit_and_repair(small.cell, replica, thorough=True)
    assert small.cell.counters.audit_violations > 0
    assert audit.violations(replica) == []
    small.run()
    assert small.output[2] == [7] * 30 and small.empty


def test_audit_of_an_idle_cell_runs_with_the_clock() -> None:
    small = SmallCell()
    small.join()
    small.replica().pool.free.pop()
    small.core.tick(small.now + 5)
    assert small.cell.counters.audit_violations and audit.violations(small.replica()) == []


def scrape(small: SmallCell) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(CellCollector(small.cell))
    lines = [line.rsplit(" ", 1) for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_gauges_show_the_true_state() -> None:
    """B43: fill the pool, abort everything, scrape; then kill the worker and scrape."""
    small = SmallCell()
    peer = small.join(num_slots=4)
    for number in range(1, 7):
        small.submit(number, [number] * 40, max_new=10)
    small.answer()
    busy = scrape(small)
    assert busy['quire_running_sequences{replica="r"}'] == 3 and busy['quire_queued_sequences{reason="new"}'] == 3
    assert busy['quire_pages{replica="r",state="held"}'] >= 30
    small.abort(*range(1, 7))
    idle = scrape(small)
    assert idle['quire_running_sequences{replica="r"}'] == idle['quire_queued_sequences{reason="new"}'] == 0
    assert idle['quire_pages{replica="r",state="held"}'] == 0
    pages = [value for name, value in idle.items() if name.startswith("quire_pages")]
    assert sum(pages) == 64
    assert idle["quire_aborts_total"] == 6 == idle['quire_finished_sequences_total{reason="abort"}']
    small.gone(peer)
    assert not [name for name in scrape(small) if "replica=" in name]


def test_counters_balance() -> None:
    small = SmallCell()
    small.join()
    small.submit(1, list(range(17)), max_new=3)
    small.run()
    small.submit(2, list(range(17)), max_new=5)
    small.run()
    small.submit(3, [1] * 500)
    found = scrape(small)
    assert found["quire_prompt_tokens_total"] == 34 and found["quire_generated_tokens_total"] == 8
    assert found["quire_prefix_lookup_tokens_total"] == 34 and found["quire_prefix_hit_tokens_total"] == 16
    assert found['quire_rejected_sequences_total{code="context_length_exceeded"}'] == 1
    assert found["quire_placement_false_credit_tokens_total"] == 0


def answer_without(small: SmallCell, peer: str, number: int) -> None:
    """The oldest plan is done; the row of this sequence had no token to choose."""
    plan = small.plans[peer].pop(0)
    slots = read_i32(plan.row_slots).tolist()[plan.num_chunk :]
    tokens = [-1 if slot == small.seq(number).slot else 7 for slot in slots]
    small.worker(peer, StepDone(plan.step, i32(tokens), b"", 0, b"", b"", b"", 0, b"", b"", 0))


def test_b44_every_token_is_booked_once_however_its_sequence_ends() -> None:
    """Of ten one moves, one is left in its prefill, four in mid-decode, one fails and four end."""
    small = SmallCell()
    peers = {name: small.join(name, num_slots=20, num_pages=400) for name in "s"}
    prompts = {number: [number * 10 + at for at in range(8 + number)] for number in range(1, 11)}
    small.submit(10, prompts[10], 12)
    small.run_until(lambda: len(small.output.get(10, [])) == 5, peers["s"])
    peers["r"] = small.join("r", num_slots=20, num_pages=400)
    small.worker(peers["s"], Drain("test"))
    small.gone(peers["s"])
    for number in range(1, 9):
        small.submit(number, prompts[number], 12)
    prompts[9] = list(range(500, 600))  # two steps
    small.submit(9, prompts[9], 12)
    small.run_until(lambda: small.seq(9).computed > 0, peers["r"])
    assert not small.output.get(9) and small.seq(9).replica is small.replica("r")
    small.abort(9)
    small.run_until(lambda: min(len(small.output.get(number, [])) for number in range(1, 9)) >= 3, peers["r"])
    small.abort(1, 2, 3, 4)
    answer_without(small, peers["r"], 5)
    small.run()
    assert small.ends == {1: 3, 2: 3, 3: 3, 4: 3, 9: 3, 5: Finish.ERROR, **dict.fromkeys((6, 7, 8, 10), Finish.LENGTH)}
    found = scrape(small)
    ends = {reason: found[f'quire_finished_sequences_total{{reason="{reason}"}}'] for reason in ("length", "abort", "error")}
    assert ends == {"length": 4, "abort": 5, "error": 1}
    assert found["quire_prompt_tokens_total"] == sum(map(len, prompts.values())), "that of a moved one is billed once"
    assert found["quire_generated_tokens_total"] == sum(map(len, small.output.values()))
    assert found["quire_recomputed_tokens_total"] == len(prompts[10]) + 5, "all that the moved one had computed or in flight"
    assert found["quire_aborts_total"] == 5 and found["quire_stale_rows_total"] > 0
    assert small.empty and small.output[10] == [7] * 12


def test_nothing_that_ends_is_left_to_the_collector() -> None:
    """Between two collections of garbage many thousand sequences may end."""
    small = SmallCell()
    small.join()
    gc.collect()
    gc.disable()
    try:
        for number in range(1, 50):
            fields = {"tenant": f"t{number % 7}", "deadline_s": number % 3 * 5.0, "priority": number % 2}
            small.submit(number, [1, 2, 3, number], 4, stream=f"s{number}" if number % 2 else "", ticket=b"x", **fields)
            if number % 5 == 0:
                small.abort(number)
            small.run()
            small.tick(7.0)
            small.cell.ended.clear()  # as the journal does
        small.tick(100.0)
        assert gc.collect() == 0
    finally:
        gc.enable()

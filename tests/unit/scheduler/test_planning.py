"""What gets into a plan, in which order, and who gives way (B37, B38, B47, S41, S61)."""

import pytest

from scheduler import groups
from scheduler.chunk_budget import FLOOR_TOKENS, MAX_GAP_US, MIN_GAP_US, ChunkBudget
from shared.columns import read_i32
from shared.messages import Finish
from tests.unit.scheduler.cells import SmallCell, rows_of

LONG = list(range(1000, 1100))


def test_steady_decode_plan_is_slots_only() -> None:
    small = SmallCell()
    peer = small.join()
    small.submit(1, [1, 2, 3], max_new=20)
    small.run_until(lambda: len(small.output.get(1, [])) == 2)
    plan = small.plans[peer][0]
    assert plan.num_decode == 1 and len(plan.row_slots) == 4
    assert not any((plan.row_lens, plan.tokens, plan.opens, plan.edits, plan.history, plan.score_positions))


def test_credits_bound_the_plans_in_flight() -> None:
    for credits in (1, 2, 3):
        small = SmallCell(credits=credits)
        peer = small.join()
        small.submit(1, [1], max_new=50)
        assert len(small.plans[peer]) == credits


def test_no_row_beyond_max_new() -> None:
    small = SmallCell(credits=4)
    peer = small.join()
    small.submit(1, [1], max_new=2)
    assert [(plan.num_last, plan.num_decode) for plan in small.plans[peer]] == [(1, 0), (0, 1)]
    small.run()
    assert small.output[1] == [7, 7] and small.ends[1] == Finish.LENGTH and small.empty


def test_rows_are_chunks_then_lasts_then_decodes() -> None:
    small = SmallCell(credits=1)
    peer = small.join()
    small.submit(1, [1, 2], max_new=30)
    small.answer()
    small.submit(2, [3, 4], max_new=30)
    small.submit(3, LONG, max_new=2)
    small.answer()
    plan = small.plans[peer][0]
    assert (plan.num_chunk, plan.num_last, plan.num_decode) == (1, 1, 1)
    assert list(rows_of(plan)) == [small.seq(3).slot, small.seq(2).slot, small.seq(1).slot]
    assert sum(rows_of(plan).values()) == 64  # max_batched_tokens
    assert read_i32(plan.tokens).tolist() == [*LONG[:61], 3, 4]


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_whole_prompt_is_cached(page_tokens: int, extra: int) -> None:
    """B47: the last known token is computed again, into a page of its own."""
    small = SmallCell(page_tokens=page_tokens)
    peer = small.join()
    prompt = list(range(3 * page_tokens + extra))
    if not prompt:
        return
    for number in (1, 2):
        small.submit(number, prompt, max_new=1)
        small.run()
    expected = (len(prompt) - 1) // page_tokens * page_tokens
    assert small.cached == {1: 0, 2: expected}
    small.submit(3, prompt, max_new=1)
    plan = small.plans[peer][0]
    assert rows_of(plan)[small.seq(3).slot] == len(prompt) - expected
    written = small.seq(3).pages[expected // page_tokens]
    assert small.replica().pool.refs[written] == 1 and written not in small.replica().pool.index.hash_of
    small.run()
    assert small.empty


def test_prompt_of_one_token_twice() -> None:
    small = SmallCell(page_tokens=1)
    small.join()
    for number in (1, 2):
        small.submit(number, [5], max_new=3)
    small.run()
    assert small.cached == {1: 0, 2: 0} and small.output[1] == small.output[2] == [7, 7, 7]


def test_twins_in_one_plan_share_their_pages() -> None:
    small = SmallCell(credits=1)
    peer = small.join()
    small.submit(9, [1], max_new=9)  # keeps the only credit while the twins arrive
    for number in (1, 2):
        small.submit(number, list(range(50, 70)), max_new=2)
    small.answer()
    plan = small.plans[peer][0]
    assert small.cached == {9: 0, 1: 0, 2: 16}
    assert rows_of(plan)[small.seq(1).slot] == 20 and rows_of(plan)[small.seq(2).slot] == 4


def test_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    small = SmallCell(credits=1)
    peer = small.join(max_model_len=1000, num_pages=400)
    small.submit(1, list(range(5000, 5900)), max_new=2)
    small.submit(2, [1, 2, 3], max_new=2)
    small.answer()
    plan = small.plans[peer][0]
    assert plan.num_last == 1 and rows_of(plan)[small.seq(2).slot] == 3
    small.run()
    assert small.ends == {1: Finish.LENGTH, 2: Finish.LENGTH}


def test_long_prompt_is_not_starved_by_short_ones() -> None:
    """Aging: it overtakes prompts that came so much later."""
    small = SmallCell(credits=1)
    small.join(max_model_len=1000, num_pages=400)
    small.submit(1, list(range(5000, 5900)), max_new=1)
    number = 1
    for _ in range(200):
        if 1 in small.ends:
            break
        number += 1
        small.submit(number, [number * 100 + at for at in range(63)], max_new=1)
        small.now += 0.05
        small.answer()
    assert 1 in small.ends


def test_preempted_sequence_keeps_its_place() -> None:
    """B38: A, B, C arrive in order; C gives way to growth; D arrives. Order stays A, B, C, D."""
    small = SmallCell()
    small.join(num_pages=13, num_slots=4)
    for _ in range(256):
        small.cell.lengths.add(1)  # the cell expects short outputs, so it takes too many
    for number in (1, 2, 3):
        small.now += 1
        small.submit(number, [number] * 9, max_new=30)
    small.run_until(lambda: small.cell.counters.preemptions)
    small.now += 1
    small.submit(4, [4] * 9, max_new=30)
    waiting = [seq.id for seq in small.cell.waiting]
    assert waiting[-1] == 4 and waiting == sorted(waiting) and len(waiting) >= 2
    assert 1 in [seq.id for seq in small.replica().running], "the oldest is never the victim"
    small.run()
    assert list(small.ends) == [1, 2, 3, 4]
    assert all(output == [7] * 30 for output in small.output.values()) and len(small.output) == 4


def test_victim_is_not_in_the_plan_that_took_its_pages() -> None:
    """B37: an urgent sequence needs the pages of one that decodes in the same step."""
    small = SmallCell(credits=1)
    peer = small.join(num_pages=11, num_slots=4)
    small.submit(1, [1] * 20, max_new=15, priority=5)
    small.answer()
    victim = small.seq(1)
    slot, pages = victim.slot, list(victim.pages)
    small.submit(2, [2] * 30, max_new=4, priority=0)
    small.answer()
    plan = small.plans[peer][0]
    assert victim.replica is None and victim.preemptions == 1
    assert rows_of(plan) == {small.seq(2).slot: 30} and plan.num_decode == 0
    assert set(small.seq(2).pages) & set(pages), "it took the victim's pages"
    assert len({page for page in small.seq(2).pages}) == 8
    assert small.output[1] == [7, 7], "the row in flight counted, nothing after it"
    small.run()
    assert small.output[1] == [7] * 15 and small.output[2] == [7] * 4 and small.empty
    assert slot


def test_preemptions_are_bounded() -> None:
    """Waves of urgent sequences stop the same one at most four times; then its pages are its own."""
    small = SmallCell(credits=1)
    small.join(num_pages=11, num_slots=4)
    small.submit(1, [1] * 8, max_new=28, priority=5)
    for number in range(2, 40):
        if 1 in small.ends:
            break
        small.submit(number, [number] * 30, max_new=2, priority=0)
        for _ in range(4):
            if any(small.plans.values()):
                small.answer()
    small.run()
    assert small.ends[1] == Finish.LENGTH and small.output[1] == [7] * 28
    assert small.cell.counters.preemptions == 4 and small.empty


def test_recovers_from_a_burst_beyond_all_slots() -> None:
    """S61, S41: three times as many as there are slots and pages for; everybody ends, then one more runs at once."""
    small = SmallCell()
    small.join(num_pages=17, num_slots=5)
    for number in range(1, 61):
        small.submit(number, [number % 7] * (number % 20 + 1), max_new=number % 9 + 1)
    small.run()
    assert set(small.ends.values()) == {Finish.LENGTH} and len(small.ends) == 60 and small.empty
    small.submit(61, [1], max_new=1)
    small.run()
    assert small.ends[61] == Finish.LENGTH


def test_rows_that_share_pages_are_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MIN_SHARED_PAGES", 2)
    small = SmallCell(credits=1)
    peer = small.join()
    for number, prompt in enumerate(([1] * 13, [2] * 9, [3], [1] * 13, [2] * 9, [1] * 9), start=1):
        small.submit(number, prompt, max_new=40)
        small.answer()
    small.answer()
    plan = small.plans[peer][0]
    by_slot = {small.seq(number).slot: number for number in range(1, 7)}
    order = [by_slot[slot] for slot in read_i32(plan.row_slots)]
    counts = read_i32(plan.group_counts).tolist()
    groups_found = {frozenset(order[:3]): counts[1], frozenset(order[3:5]): counts[3]}
    assert counts[0::2] == [3, 2] and groups_found == {frozenset({1, 4, 6}): 2, frozenset({2, 5}): 2}


def test_group_ends_with_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MIN_SHARED_PAGES", 2)
    small = SmallCell(credits=1)
    peer = small.join()
    for number in (1, 2):
        small.submit(number, [1] * 13, max_new=40)
        small.answer()
    small.answer()
    assert read_i32(small.plans[peer][0].group_counts).tolist() == [2, 3]
    small.abort(2)
    small.answer()
    assert small.plans[peer][0].group_counts == b""


def test_chunk_budget_grows_with_what_waits() -> None:
    budget = ChunkBudget(32768)
    assert budget.tokens(16, 100) == 32768 - 16  # nothing is known
    for _ in range(20):
        budget.observe(0, 16, 6_000)
        budget.observe(2048, 16, 6_000 + 2048 * 20)
    assert abs(budget.tokens(16, 512) - (MIN_GAP_US - 6_000) / 20) < 5
    assert abs(budget.tokens(16, 2000) - (MAX_GAP_US - 6_000) / 20) < 130
    assert budget.tokens(0, 512) == 32768  # nobody waits for a token
    for _ in range(100):
        budget.observe(0, 16, 60_000)
    assert budget.tokens(16, 512) == FLOOR_TOKENS  # the target cannot be kept, prefill still moves


def test_decode_rows_always_fit_the_token_budget() -> None:
    small = SmallCell()
    peer = small.join(num_slots=50, max_batched_tokens=8)
    for number in range(1, 30):
        small.submit(number, [number] * 5, max_new=3)
    while any(small.plans.values()):
        assert sum(rows_of(small.plans[peer][0]).values()) <= 8
        small.answer()
    assert len(small.ends) == 29 and small.empty


def test_prompts_are_cut_into_large_pieces() -> None:
    small = SmallCell()
    peer = small.join(num_slots=50, max_batched_tokens=4096, num_pages=4096, max_model_len=8192)
    pieces: list[list[int]] = []
    small.submit(1, list(range(10, 3810)), max_new=2)
    small.submit(2, list(range(5000, 8900)), max_new=2)
    while any(small.plans.values()):
        pieces.append(read_i32(small.plans[peer][0].row_lens).tolist())
        small.answer()
    # 296 tokens of the second prompt would have fitted beside the first one.
    assert [each for each in pieces if each] == [[3800], [3900]] and len(small.ends) == 2


@pytest.mark.parametrize(("num_tokens", "expected"), [(2600, [[1000], [1600]]), (2400, [[2400]])])
def test_a_rest_comes_along(num_tokens: int, expected: list[list[int]]) -> None:
    small = SmallCell()
    peer = small.join(num_slots=50, max_batched_tokens=4096, num_pages=4096, max_model_len=8192)
    small.submit(1, list(range(10, 20)), max_new=40)
    small.answer()
    budget = small.cell.replicas["r"].chunk_budget
    budget.decode_us, budget.token_us = 1000.0, (MAX_GAP_US - 1000.0) / 1000  # 1,000 tokens a step
    small.submit(2, list(range(100, 100 + num_tokens)), max_new=1)
    pieces: list[list[int]] = []
    while any(small.plans.values()) and len(pieces) < 5:
        budget.decode_us, budget.token_us = 1000.0, (MAX_GAP_US - 1000.0) / 1000
        pieces.append(read_i32(small.plans[peer][0].row_lens).tolist())
        small.answer()
    assert [each for each in pieces if each] == expected

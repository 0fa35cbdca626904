"""B40: a pool that holds 1.1 times what the sequences need on average. Little is computed twice and throughput stays high."""

import random
from collections.abc import Callable

import pytest

from scheduler.sequence import MAX_PREEMPTIONS
from shared.columns import i32, read_i32
from shared.messages import Finish, StepDone
from tests.unit.scheduler.cells import SmallCell

NUM_SEQUENCES = 64
PROMPT = 100
STOP = 2

PEER = "w/r/0/1"


def sampled(small: SmallCell, lengths: dict[int, int]) -> None:
    """The oldest plan is done; a sequence stops after its own length."""
    plan = small.plans[PEER].pop(0)
    by_slot = {seq.slot: seq for seq in small.replica().running}
    rows = [by_slot.get(slot) for slot in read_i32(plan.row_slots).tolist()[plan.num_chunk :]]
    tokens = [STOP if seq is not None and seq.num_output + 1 >= lengths[seq.id] else 7 for seq in rows]
    small.worker(PEER, StepDone(plan.step, i32(tokens), b"", 0, b"", b"", b"", 0, b"", b"", 0))


def run(lengths: list[int], max_new: int, *, arrive_every: int, num_pages: int) -> SmallCell:
    """Every sequence stops after its own length; one arrives every so many steps."""
    small = SmallCell(page_tokens=16)
    small.join(num_pages=num_pages, num_slots=2 * NUM_SEQUENCES + 1, max_batched_tokens=512, max_model_len=8192)
    by_id = dict(enumerate(lengths, start=1))
    for step in range(100_000):
        if step % arrive_every == 0 and step // arrive_every < len(lengths):
            number = step // arrive_every + 1
            prompt = [number * 1000 + at for at in range(PROMPT)]
            small.submit(number, prompt, max_new=max_new, stop_ids=i32([STOP]))
        if not small.plans[PEER]:
            if len(small.ends) == len(lengths):
                return small
            continue
        assert all(seq.preemptions <= MAX_PREEMPTIONS for seq in small.replica().running)
        sampled(small, by_id)
    raise AssertionError("it never ends")


def fixed(random_: random.Random) -> list[int]:
    return [500] * NUM_SEQUENCES


def mixed(random_: random.Random) -> list[int]:
    return [min(int(random_.expovariate(1 / 500)) + 1, 2000) for _ in range(NUM_SEQUENCES)]


@pytest.mark.parametrize("arrive_every", [1, 8])
@pytest.mark.parametrize("max_new", [500, 4096])
@pytest.mark.parametrize("outputs", [fixed, mixed])
def test_little_is_computed_twice(outputs: Callable[[random.Random], list[int]], max_new: int, arrive_every: int) -> None:
    lengths = [min(length, max_new) for length in outputs(random.Random(3))]
    average = sum(PROMPT + length / 2 for length in lengths) / NUM_SEQUENCES  # tokens held by one, over its life
    num_pages = int(1.1 * NUM_SEQUENCES * average / 16) + 1
    small = run(lengths, max_new, arrive_every=arrive_every, num_pages=num_pages)
    counters = small.cell.counters
    useful = NUM_SEQUENCES * PROMPT + sum(lengths)
    assert all(reason in (Finish.STOP, Finish.LENGTH) for reason in small.ends.values())
    assert counters.recomputed_tokens <= 0.10 * useful, f"{counters.recomputed_tokens} of {useful} tokens"
    assert counters.preemptions <= NUM_SEQUENCES
    tokens_per_step = counters.generated_tokens / counters.steps
    assert tokens_per_step > 10, f"the reserve leaves the device idle: {tokens_per_step:.1f} rows per step"
    print(
        f"{counters.recomputed_tokens} of {useful} again, {counters.preemptions} preemptions, {tokens_per_step:.1f} rows a step"
    )


def rows_per_step(num_clients: int, num_pages: int) -> float:
    """Each client asks again as soon as it is answered; what a step brings once all have begun."""
    small = SmallCell(page_tokens=16)
    small.join(num_pages=num_pages, num_slots=257, max_batched_tokens=512, max_model_len=8192)
    random_ = random.Random(4)
    lengths: dict[int, int] = {}
    before = 0
    for step in range(1600):
        while len(lengths) - len(small.ends) < num_clients:
            number = len(lengths) + 1
            lengths[number] = min(int(random_.expovariate(1 / 300)) + 1, 1000)
            small.submit(number, [number * 1000 + at for at in range(PROMPT)], 1000, stop_ids=i32([STOP]))
        sampled(small, lengths)
        if step == 400:
            before = small.cell.counters.generated_tokens
    counters = small.cell.counters
    assert counters.recomputed_tokens <= 0.10 * (counters.prompt_tokens + counters.generated_tokens)
    return (counters.generated_tokens - before) / 1200


def test_throughput_does_not_fall_with_the_load() -> None:
    """From half of what the pool holds on average to more than twice."""
    pages = 32 * (PROMPT + 300) // 16
    rows = [rows_per_step(num_clients, pages) for num_clients in (16, 32, 48, 80)]
    print(f"rows per step {[round(each, 1) for each in rows]}")
    assert rows[0] > 14 and all(later > 0.85 * max(rows[: at + 1]) for at, later in enumerate(rows[1:]))

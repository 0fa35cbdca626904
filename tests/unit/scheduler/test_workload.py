"""The work-seconds signal: what it learns from steps, and what it says of queues and running sequences."""

import pytest

from scheduler.forecast import PRIOR
from scheduler.workload import WINDOW_US, DecodeSpeed, work_s
from tests.unit.scheduler.cells import SmallCell


def feed(speed: DecodeSpeed, rows: int, step_us: int, windows: int = 1) -> None:
    for _ in range(windows * WINDOW_US // step_us):
        speed.observe(0, rows, step_us)


def test_speed_is_that_of_full_steps() -> None:
    speed = DecodeSpeed()
    assert speed.token_us == 0
    feed(speed, rows=1, step_us=10_000)
    assert speed.token_us == 10_000
    feed(speed, rows=100, step_us=20_000)
    assert speed.token_us == 200
    feed(speed, rows=2, step_us=10_000, windows=50)  # hardly loaded: says nothing of a full step
    assert speed.token_us == 200
    feed(speed, rows=95, step_us=40_000, windows=30)  # longer contexts
    assert speed.token_us == pytest.approx(421, rel=0.01)
    speed.observe(512, 100, 10**9)  # steps with prefill say nothing of decode
    assert speed.token_us == pytest.approx(421, rel=0.01)


def test_an_hour_of_low_load_is_a_new_full() -> None:
    speed = DecodeSpeed()
    feed(speed, rows=100, step_us=20_000)
    feed(speed, rows=10, step_us=10_000, windows=3600)
    assert speed.token_us == pytest.approx(1000, rel=0.01)


def test_work_is_all_that_waits_and_runs() -> None:
    small = SmallCell()
    assert work_s(small.cell) == 0
    peer = small.join(num_slots=3)  # two run at once
    small.cell.speed.token_us = 1e6 / 100  # 100 tokens a second
    for number in range(1, 5):
        small.submit(number, [1, 2, 3], max_new=10)
    assert len(small.cell.waiting) == 3
    assert work_s(small.cell) == pytest.approx(4 * 10 / 100)  # nobody is expected to get more than it asked for
    small.answer(peer)
    small.answer(peer)
    assert len(small.cell.waiting) == 2
    assert work_s(small.cell) == pytest.approx((3 * 10 + 8) / 100)
    small.run()
    assert work_s(small.cell) == 0


def test_prefill_counts_at_its_own_speed() -> None:
    small = SmallCell()
    small.join(num_slots=2)
    small.cell.replicas["r"].chunk_budget.token_us = 1e6 / 1000
    for number in (1, 2):
        small.submit(number, list(range(number * 100, number * 100 + 50)), max_new=1)
    assert work_s(small.cell) == pytest.approx(50 / 1000)  # the first one's is all in flight


def test_long_outputs_are_expected_to_end_like_recent_ones() -> None:
    small = SmallCell()
    small.join(num_slots=2, max_model_len=4096)
    small.cell.speed.token_us = 1e6
    small.submit(1, [1], max_new=4000)
    assert work_s(small.cell) <= max(PRIOR)

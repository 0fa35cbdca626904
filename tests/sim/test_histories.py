"""Random histories of a whole cell: every token of every sequence is checked, the books are clean after each."""

import pytest

from scheduler import groups
from tests.sim.world import Shape, World

HISTORIES = 1200
PARTS = 12


@pytest.mark.parametrize("part", range(PARTS))
def test_random_histories(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MIN_SHARED_PAGES", 2 if part % 2 else 8)
    totals = {"preemptions": 0, "failovers": 0, "hit_tokens": 0, "stale_rows": 0, "steps": 0}
    for seed in range(part, HISTORIES, PARTS):
        world = World(seed)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"history {seed} of {world.shape}") from error
        for name in totals:
            totals[name] += getattr(world.core.cell.counters, name)
    assert all(totals.values()), f"something never happened: {totals}"


def test_a_seed_is_a_history() -> None:
    def trace() -> list[object]:
        world = World(7).run()
        return [stream for gateway in world.gateways for stream in gateway.streams.values()]

    assert trace() == trace()


@pytest.mark.parametrize("credits", [1, 2, 4])
def test_calm_cell_of_one_replica(credits: int) -> None:
    """Nothing dies: every sequence that was not aborted ends with its whole reference output."""
    for seed in range(20):
        World(seed, Shape(num_replicas=1, num_gateways=1, credits=credits, calm=True)).run()


def test_page_of_one_token() -> None:
    for seed in range(20):
        World(seed, Shape(page_tokens=1, num_pages=150, calm=seed % 2 == 0)).run()

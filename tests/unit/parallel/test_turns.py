"""Ranks whose links break at any moment launch the same plans in the same order, through a real store."""

import random
import socket
import threading
import time
from typing import Any

import pytest
from torch._C import _distributed_c10d as c10d

from gpu_worker.parallel.group import HOST, Group
from gpu_worker.parallel.turns import Turns
from shared.columns import i32
from shared.messages import StepPlan
from tests.plan_driver import make_plan


class Rank:
    """One rank's turns, and what reached its launch thread: (place of the turn in its life, step)."""

    def __init__(self, group: Group) -> None:
        self.launched: list[tuple[int, int]] = []
        self.incarnation = 1
        self._incarnations: list[int] = []  # in which something was launched
        self.turns = Turns(group, self._launch)
        self.turns.start()

    def _launch(self, incarnation: int, plan: StepPlan) -> None:
        if not self._incarnations or self._incarnations[-1] != incarnation:
            self._incarnations.append(incarnation)
        self.launched.append((len(self._incarnations), plan.step))

    def lose(self) -> None:
        self.turns.lost(self.incarnation)
        self.incarnation += 1


@pytest.fixture
def ranks() -> list[Rank]:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        store = c10d.TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    nothing: Any = store  # kept alive there; no collective is called
    return [Rank(Group(rank=rank, size=3, number=1, port=port, collectives=nothing)) for rank in range(3)]


def until_equal(ranks: list[Rank], last: int) -> None:
    deadline = time.monotonic() + 30
    while any(not rank.launched or rank.launched[-1][1] != last for rank in ranks):
        assert time.monotonic() < deadline, [rank.launched[-5:] for rank in ranks]
        time.sleep(0.005)


@pytest.mark.parametrize("seed", range(12))
def test_any_history(ranks: list[Rank], seed: int) -> None:
    """Every turn may miss some ranks, deliver a different number of its plans to each, and break before or after."""
    chance = random.Random(seed)
    step = 0
    for turn in range(12):
        for rank in chance.sample(ranks, 3):
            if chance.random() < 0.2:
                rank.lose()  # before it could be welcomed
                continue
            rank.turns.welcome(rank.incarnation, f"1.{turn}")
            for number in range(chance.choice((0, 1, 2, 2, 3))):
                rank.turns.put(rank.incarnation, make_plan(step + 1 + number, row_slots=i32([1])))
            if chance.random() < 0.5:
                time.sleep(chance.random() * 0.01)
        step += 3
        for rank in chance.sample(ranks, 3):
            rank.lose()
    for rank in ranks:  # a last turn that everybody has
        rank.turns.welcome(rank.incarnation, "1.last")
        rank.turns.put(rank.incarnation, make_plan(10_000))
    until_equal(ranks, 10_000)
    first = ranks[0].launched
    assert all(rank.launched == first for rank in ranks)
    assert [step for _, step in first] == sorted({step for _, step in first})
    for rank in ranks:
        rank.turns.stop()


def test_nothing_is_launched_before_all_have_joined(ranks: list[Rank]) -> None:
    for rank in ranks[:2]:
        rank.turns.welcome(1, "1.1")
        rank.turns.put(1, make_plan(7))
    time.sleep(0.1)
    assert not any(rank.launched for rank in ranks)
    ranks[2].turns.welcome(1, "1.1")
    ranks[2].turns.put(1, make_plan(7))
    until_equal(ranks, 7)
    ranks[0].turns.put(1, make_plan(8))  # reaches one rank only, then the scheduler dies
    until_equal(ranks[:1], 8)
    assert ranks[1].launched == [(1, 7)]
    for rank in ranks:
        rank.lose()
        rank.turns.welcome(2, "2.1")
    until_equal(ranks, 8)  # the others were handed it, for the first waits for them in it
    for rank in ranks:
        rank.turns.stop()
    assert threading.active_count() < 50

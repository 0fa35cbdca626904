"""The autoscaler's arithmetic, with the numbers of the manifest, against a cell whose load jumps and falls."""

import math
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from scheduler.workload import DecodeSpeed

ROOT = Path(__file__).resolve().parents[3]
SYNC_S = 15  # the autoscaler looks this often
TOLERANCE = 0.1  # and leaves a smaller difference alone
START_S = 90  # from a new pod to its first plan
METRIC_AGE_S = 20  # scrape interval and adapter

# A replica: 64 sequences at most, a step takes 12 ms + 0.12 ms a row, a sequence wants 400 tokens. Full: 8.1 sequences/s.
SLOTS, BASE_S, ROW_S, OUTPUT = 64, 0.012, 0.00012, 400
FULL_SEQ_PER_S = SLOTS / (BASE_S + ROW_S * SLOTS) / OUTPUT


def manifest() -> dict[str, Any]:
    documents = yaml.safe_load_all((ROOT / "k8s/base/worker.yaml").read_text())
    return next(each["spec"] for each in documents if each["kind"] == "HorizontalPodAutoscaler")


@dataclass
class Autoscaler:
    """autoscaling/v2 for an Object metric with AverageValue: recommendation, stabilization windows, rate limits."""

    spec: dict[str, Any]
    advice: deque[tuple[float, int]] = field(default_factory=deque)
    changes: deque[tuple[float, int]] = field(default_factory=deque)

    def decide(self, now: float, replicas: int, value: float) -> int:
        target = float(self.spec["metrics"][0]["object"]["target"]["averageValue"])
        wanted = replicas if abs(1 - value / (target * replicas)) <= TOLERANCE else math.ceil(value / target)
        self.advice.append((now, wanted))
        up, down = self.spec["behavior"]["scaleUp"], self.spec["behavior"]["scaleDown"]
        floor = min(n for at, n in self.advice if at > now - up.get("stabilizationWindowSeconds", 0) or at == now)
        ceiling = max(n for at, n in self.advice if at > now - down["stabilizationWindowSeconds"] or at == now)
        wanted = min(max(replicas, floor), ceiling)
        wanted = min(wanted, replicas + self._room(now, replicas, up["policies"][0], 1))
        wanted = max(wanted, replicas - self._room(now, replicas, down["policies"][0], -1))
        low, high = int(self.spec["minReplicas"]), int(self.spec["maxReplicas"])
        wanted = min(max(wanted, low), high)
        if wanted != replicas:
            self.changes.append((now, wanted - replicas))
        return wanted

    def _room(self, now: float, replicas: int, policy: dict[str, Any], sign: int) -> int:
        recent = sum(n for at, n in self.changes if at > now - policy["periodSeconds"] and n * sign > 0)
        before = replicas - recent
        limit = int(policy["value"]) if policy["type"] == "Pods" else math.ceil(before * policy["value"] / 100)
        return max(0, limit - abs(recent))


class Cell:
    """Sequences wait for a slot, then get a token per step of their replica. Time moves in steps of dt."""

    def __init__(self, seed: int) -> None:
        self.noise = random.Random(seed)
        self.waiting: deque[float] = deque()  # arrival times
        self.running: list[list[float]] = [[]]  # per replica: tokens left of each sequence
        self.starting: list[float] = []  # when pods become ready
        self.speed = DecodeSpeed()
        self.waits: list[tuple[float, float]] = []  # (arrival, wait)

    @property
    def replicas(self) -> int:
        return len(self.running) + len(self.starting)

    def resize(self, wanted: int, now: float) -> None:
        while self.replicas < wanted:
            self.starting.append(now + START_S)
        while self.replicas > wanted:
            if self.starting:
                self.starting.pop()
            else:  # its sequences move; they keep their place in the queue
                self.waiting.extendleft(now for _ in self.running.pop())

    def move(self, now: float, dt: float, per_s: float) -> None:
        ready = [at for at in self.starting if at <= now]
        self.starting = [at for at in self.starting if at > now]
        self.running.extend([] for _ in ready)
        for _ in range(sum(self.noise.random() < per_s * dt / 50 for _ in range(50))):
            self.waiting.append(now)
        for sequences in self.running:
            while self.waiting and len(sequences) < SLOTS:
                arrived = self.waiting.popleft()
                self.waits.append((arrived, now - arrived))
                sequences.append(self.noise.uniform(0.5, 1.5) * OUTPUT)
            if not sequences:
                continue
            step_s = BASE_S + ROW_S * len(sequences)
            for _ in range(max(1, round(dt / step_s / 8))):
                self.speed.observe(0, len(sequences), int(step_s * 8e6 / 8))
            sequences[:] = [left - dt / step_s for left in sequences if left > dt / step_s]

    @property
    def work_s(self) -> float:
        tokens = sum(left for sequences in self.running for left in sequences) + OUTPUT * len(self.waiting)
        return tokens * self.speed.token_us / 1e6


def play(load: list[tuple[float, float]], seed: int, spec: dict[str, Any] | None = None) -> tuple[list[int], Cell]:
    """load: (seconds, share of one full replica). Returns the replicas at every look of the autoscaler."""
    cell, scaler, dt = Cell(seed), Autoscaler(spec or manifest()), 0.5
    seen: deque[float] = deque([0.0], maxlen=int(METRIC_AGE_S / dt))
    history, now = [], 0.0
    for seconds, share in load:
        end = now + seconds
        while now < end:
            cell.move(now, dt, share * FULL_SEQ_PER_S)
            seen.append(cell.work_s)
            if now % SYNC_S == 0:
                cell.resize(scaler.decide(now, cell.replicas, seen[0]), now)
                history.append(cell.replicas)
            now += dt
    return history, cell


def turns(history: list[int]) -> int:
    """How often it changed direction."""
    steps = [b - a for a, b in pairwise(history) if a != b]
    return sum(a * b < 0 for a, b in pairwise(steps))


@pytest.mark.parametrize("seed", range(5))
def test_a_step_up_is_followed_in_time_and_without_swinging(seed: int) -> None:
    history, cell = play([(900, 0.4), (1800, 3.0)], seed)
    assert history[900 // SYNC_S - 1] == 1  # a quiet cell stays small
    needed = math.ceil(3.0)
    assert history[-1] >= needed
    reached = next(at for at, n in enumerate(history) if n >= needed) * SYNC_S - 900
    assert reached <= 120, f"{reached} s until {needed} replicas were asked for"
    assert turns(history) <= 1
    late = [wait for arrived, wait in cell.waits if arrived > 900 + 900]
    assert sorted(late)[int(0.99 * len(late))] < 2.0  # a quarter of an hour later nobody waits


@pytest.mark.parametrize("seed", range(5))
def test_steady_load_is_left_alone(seed: int) -> None:
    for share in (0.5, 1.7, 2.5):
        history, _ = play([(3600, share)], seed)
        settled = history[len(history) // 2 :]
        assert max(settled) - min(settled) <= 1, settled
        assert turns(settled) <= 2


@pytest.mark.parametrize("seed", range(5))
def test_a_step_down_gives_the_pods_back_one_at_a_time(seed: int) -> None:
    history, _ = play([(1800, 3.0), (3600, 0.3)], seed)
    assert history[-1] == 1
    assert turns(history) <= 1
    assert all(b - a >= -1 for a, b in pairwise(history))


def test_a_short_burst_starts_no_pods() -> None:
    history, _ = play([(600, 0.5), (10, 4.0), (600, 0.5)], 1)
    assert max(history) <= 2


def test_numbers_that_would_swing_are_noticed() -> None:
    """The same load with hasty numbers: what the tests above would catch."""
    spec = manifest()
    spec["behavior"]["scaleDown"] = {
        "stabilizationWindowSeconds": 0,
        "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
    }
    spec["metrics"][0]["object"]["target"]["averageValue"] = "1"
    swings = [turns(play([(3600, 1.7)], seed, spec)[0]) for seed in range(3)]
    assert max(swings) > 2

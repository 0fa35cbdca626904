"""Replicas come, fail, leave and come back (S68, strikes, tensor-parallel ranks, drain)."""

import struct
from typing import Any

import pytest

from scheduler import workers
from scheduler.cell import MAX_PARDONS
from scheduler.sequence import Sequence
from shared.columns import i32
from shared.messages import (
    PROTOCOL,
    Drain,
    DrainAnswer,
    DrainWorker,
    Fault,
    Finish,
    GatewayHello,
    Reset,
    StepDone,
    StepPlan,
    WorkerAlive,
    WorkerWelcome,
)
from tests.unit.scheduler.cells import SmallCell, rows_of

PEER = "w/r/0/1"
PROMPT = list(range(40, 57))  # 4 full pages and one token


def resets(small: SmallCell) -> dict[str, Reset]:
    return {peer: message for peer, message in small.sent if isinstance(message, Reset)}


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"protocol": PROTOCOL + 1}, (str(PROTOCOL), str(PROTOCOL + 1))),
        ({"model": "other"}, ("m", "other")),
        ({"page_tokens": 16}, ("4", "16")),
        ({"rank": 2, "tp": 2}, ("2",)),
        ({"num_pages": 1}, ("num_pages", "1")),
        ({"num_slots": 0}, ("num_slots", "0")),
    ],
)
def test_worker_that_does_not_fit_is_refused_for_good(fields: dict[str, Any], values: tuple[str, ...]) -> None:
    small = SmallCell()
    small.join("first")
    small.join("second", **fields)
    reset = resets(small)["w/second/0/1"]
    assert reset.fatal and all(value in reset.reason for value in values)
    assert list(small.cell.replicas) == ["first"]


def test_a_new_model_may_come_when_nobody_uses_the_old_one() -> None:
    small = SmallCell()
    small.join()
    small.gone(PEER)
    small.join(model="other", peer="w/r/0/2")
    reset = resets(small)["w/r/0/2"]
    assert reset.fatal and "model other" in reset.reason and "gateway a model m" in reset.reason
    small.gone("g/a/1")
    small.join(model="other", peer="w/r/0/3")
    assert small.replica().model == "other"


def test_gateway_of_another_model_is_refused() -> None:
    small = SmallCell()
    small.join(model="m bfloat16")
    small.gateway(GatewayHello(PROTOCOL, "b", "other"), peer="g/b/1")
    reset = resets(small)["g/b/1"]
    assert reset.fatal and "other" in reset.reason and "m bfloat16" in reset.reason
    small.gateway(GatewayHello(PROTOCOL, "c", "m"), peer="g/c/1")
    assert list(small.cell.gateways) == ["g/a/1", "g/c/1"]


def test_stranger_must_say_hello() -> None:
    small = SmallCell()
    small.worker("w/x/0/9", WorkerAlive(1, 0, 0, 0.0))
    assert not resets(small)["w/x/0/9"].fatal


def test_sequences_of_a_dead_worker_go_on_elsewhere() -> None:
    small = SmallCell()
    small.join("r")
    small.join("s", num_slots=2, num_pages=9)
    for number in (1, 2, 3):
        small.submit(number, [number] * 5, max_new=12)
    small.run_until(lambda: len(small.output.get(1, [])) > 3)
    small.gone(PEER)
    assert list(small.cell.replicas) == ["s"]
    small.run()
    assert small.output == {number: [7] * 12 for number in (1, 2, 3)}
    assert small.cell.counters.failovers == 1 and small.empty


def test_pages_of_a_failed_step_are_never_shared() -> None:
    """S68: the step that should have written the prefix fails; the worker still believes in all of it."""
    small = SmallCell()
    small.join()
    small.submit(1, PROMPT, max_new=9)
    plan = small.plans[PEER].pop(0)
    inventory = plan.registrations
    assert len(inventory) == 4 * 20
    small.plans[PEER].clear()
    small.worker(PEER, Fault(plan.step, "boom"))
    assert not small.cell.replicas
    small.abort(1)  # or it would write the prefix anew
    small.worker(PEER, small.hello(inventory=inventory))
    small.submit(2, PROMPT, max_new=1)
    small.run()
    assert small.cached[2] == 0, "nothing of the failed step was believed"


def test_pages_of_acknowledged_steps_come_back_with_the_inventory() -> None:
    small = SmallCell()
    small.join()
    small.submit(1, PROMPT, max_new=1)
    inventory = small.answer().registrations
    small.gone(PEER)
    small.join(peer="w/r/0/2", inventory=inventory)
    small.submit(2, PROMPT, max_new=1)
    small.run()
    assert small.cached[2] == 16


def test_inventory_of_a_restarted_scheduler_is_believed_and_checked() -> None:
    small = SmallCell()
    good = struct.pack("<i16s", 5, small.submission(1, PROMPT).page_hashes[:16])
    rubbish = [(0, b"a" * 16), (-4, b"b" * 16), (999, b"c" * 16), (6, bytes(16)), (5, b"d" * 16)]
    column = good + b"".join(struct.pack("<i16s", *entry) for entry in rubbish)
    small.join(inventory=column[:20] + column[20:100])  # the last would name page 5 twice
    small.submit(1, PROMPT, max_new=1)
    small.run()
    assert small.cached[1] == 4 and small.empty


def test_what_is_not_believed_the_worker_must_forget() -> None:
    small = SmallCell()
    small.join()
    small.gone(PEER)  # certain about nothing
    small.join(peer="w/r/0/2", inventory=struct.pack("<i16s", 5, b"x" * 16))
    small.submit(1, [1], max_new=1)
    plan = small.plans["w/r/0/2"][0]
    assert (5, bytes(16)) in list(struct.iter_unpack("<i16s", plan.registrations))


def test_evicted_page_is_forgotten_by_the_plan_that_takes_it() -> None:
    small = SmallCell(credits=1)
    small.join(num_pages=6)
    small.submit(1, PROMPT, max_new=1)
    small.run()
    small.submit(2, list(range(900, 917)), max_new=1)
    news = dict(struct.iter_unpack("<i16s", small.plans[PEER][0].registrations))
    assert len(news) == 5 - 1 + sum(not any(page_hash) for page_hash in news.values())
    small.run()
    assert small.empty


def fail(small: SmallCell, peer: str = PEER) -> None:
    """The oldest plan fails and the worker comes back empty."""
    step = small.plans[peer][0].step
    small.plans[peer].clear()
    small.worker(peer, Fault(step, "boom"))
    small.worker(peer, small.hello())


def plan_holds(small: SmallCell, plan: StepPlan, number: int) -> bool:
    outbox = small.cell.gateways["g/a/1"]
    return number in outbox.sequences and outbox.sequences[number].slot in rows_of(plan)


def test_poisonous_sequence_is_found_and_the_others_live() -> None:
    """Every step with a row of sequence 2 fails."""
    small = SmallCell()
    small.join()
    for number in (1, 2, 3):
        small.submit(number, [number] * 3, max_new=10)
    for _ in range(200):
        plans = small.plans[PEER]
        if not plans:
            break
        if plan_holds(small, plans[0], 2):
            fail(small)
        else:
            small.answer()
    assert small.ends == {1: Finish.LENGTH, 2: Finish.ERROR, 3: Finish.LENGTH}
    assert small.output[1] == small.output[3] == [7] * 10 and small.empty
    assert small.cell.counters.failovers <= 3


def test_sequence_that_only_fails_in_decode_is_found_too() -> None:
    small = SmallCell()
    small.join()
    for number in (1, 2, 3):
        small.submit(number, [number] * 3, max_new=30)
    for _ in range(400):
        plans = small.plans[PEER]
        if not plans:
            break
        if plan_holds(small, plans[0], 2) and plans[0].num_decode and len(small.output.get(2, [])) >= 5:
            fail(small)
        else:
            small.answer()
    assert small.ends == {1: Finish.LENGTH, 2: Finish.ERROR, 3: Finish.LENGTH}
    assert small.empty and small.cell.counters.failovers <= 4


def test_a_dead_worker_may_have_died_of_any_plan_in_flight() -> None:
    """Its first plan is computed and its result not sent yet, when the poison in the second kills it."""
    small = SmallCell()
    peer = small.join()
    small.submit(1, [1, 2, 3], 20)
    small.answer()
    small.submit(2, [4, 5, 6], 20)  # in the younger of two plans only
    small.answer()
    assert [plan.num_last for plan in small.plans[peer]] == [0, 1]
    small.gone(peer)
    assert small.seq(1).strikes == small.seq(2).strikes == 1
    small.join()
    poison = small.seq(2)
    small.run_until(lambda: small.replica().alone is poison)
    small.gone(peer)
    assert small.ends == {2: Finish.ERROR}, "two deaths"
    small.join()
    small.run()
    assert small.output[1] == [7] * 20 and small.ends[1] == Finish.LENGTH


def test_struck_sequence_runs_alone() -> None:
    small = SmallCell(credits=2)
    small.join()
    for number in (1, 2):
        small.submit(number, [number] * 3, max_new=30)
    small.answer()
    small.answer()
    fail(small)
    lengths = {number: len(small.seq(number).tokens) for number in (1, 2)}
    for number in (1, 2):
        assert len(small.plans[PEER]) == 1, "nothing else in flight"
        assert rows_of(small.plans[PEER][0]) == {small.seq(number).slot: lengths[number]}
        small.answer()
    assert len(small.plans[PEER]) == 2 and small.plans[PEER][0].num_decode == 2
    small.run()
    assert small.output[1] == small.output[2] == [7] * 30


def out_of_reach(small: SmallCell, incarnation: int, process: int) -> str:
    """The worker is gone without a word, and one says hello in its place; its peer."""
    small.gone(f"w/r/0/{incarnation}")
    small.plans.clear()
    return small.join(peer=f"w/r/0/{incarnation + 1}", process=process)


def test_a_worker_that_was_only_out_of_reach_was_not_killed_by_its_rows() -> None:
    """Frozen again and again, or its link cut: the same process says hello."""
    small = SmallCell()
    peer = small.join(process=5)
    small.submit(1, [1] * 3, max_new=100)
    small.submit(2, [2] * 3, max_new=100)
    for incarnation in range(1, 6):
        small.answer(peer)
        small.answer(peer)
        peer = out_of_reach(small, incarnation, process=5)
        assert small.seq(1).strikes == small.seq(2).strikes == 0
        assert small.plans[peer][0].num_last == 2, "and nobody has to run alone"
    small.run()
    assert small.output[1] == small.output[2] == [7] * 100 and small.empty


def test_who_silences_the_same_process_for_ever_is_found_all_the_same() -> None:
    small = SmallCell()
    peer = small.join(process=5)
    small.submit(1, [1] * 3, max_new=100)
    for incarnation in range(1, 30):
        if 1 in small.ends:
            break
        peer = out_of_reach(small, incarnation, process=5)
    assert small.ends == {1: Finish.ERROR} and incarnation <= MAX_PARDONS + 3, peer


def test_nobody_is_refused_for_deaths_in_company() -> None:
    """Somebody kills the worker again and again before 256 tokens were computed since the last time."""
    small = SmallCell()
    peer = small.join(process=1)
    for number in (1, 2):
        small.submit(number, [number] * 3, max_new=110)
    for incarnation in range(1, 4):
        small.run_until(lambda: small.replica().alone is None and small.replica().decoding.keys() >= both(small), peer)
        small.answer(peer)
        peer = out_of_reach(small, incarnation, process=1 + incarnation)
        assert small.seq(1).strikes == small.seq(2).strikes == incarnation
    small.run()
    assert small.output[1] == small.output[2] == [7] * 110 and small.empty


def both(small: SmallCell) -> set[Sequence]:
    return {small.seq(1), small.seq(2)}


def test_hung_step_is_noticed_and_its_worker_sent_away() -> None:
    small = SmallCell()
    small.join()
    small.submit(1, [1, 2], max_new=20)
    small.tick(9.0)
    small.answer()  # progress: the clock starts again
    small.tick(9.0)
    assert small.cell.replicas
    small.tick(2.0)
    assert not small.cell.replicas and not resets(small)[PEER].fatal
    small.plans.clear()
    small.join(peer="w/r/0/2")
    small.run()
    assert small.output[1] == [7] * 20


def test_own_stall_is_no_hung_step() -> None:
    small = SmallCell()
    small.join()
    small.submit(1, [1, 2], max_new=20)
    small.core.excuse(50.0)
    small.tick(50.0)
    assert small.cell.replicas
    small.tick(11.0)
    assert not small.cell.replicas


@pytest.mark.parametrize(
    "change",
    [
        {"step": 999},
        {"tokens": b""},
        {"tokens": bytes(8)},
        {"logprobs": bytes(8)},
        {"top_width": 3},
        {"top_width": -1},
        {"score_logprobs": bytes(4)},
        {"score_top_width": 2, "score_top_ids": bytes(8)},
    ],
)
def test_wrong_result_drops_the_replica_not_the_scheduler(change: dict[str, Any]) -> None:
    small = SmallCell()
    small.join()
    small.submit(1, [1, 2], max_new=5)
    plan = small.plans[PEER].pop(0)
    done = StepDone(plan.step, i32([7]), b"", 0, b"", b"", b"", 0, b"", b"", 0)
    small.plans[PEER].clear()
    small.worker(PEER, done._replace(**change))
    assert PEER in resets(small) and not small.cell.replicas
    small.join(peer="w/r/0/2")
    small.run()
    assert small.output[1] == [7] * 5


def test_result_without_a_plan_drops_the_replica() -> None:
    small = SmallCell()
    small.join()
    small.worker(PEER, StepDone(1, b"", b"", 0, b"", b"", b"", 0, b"", b"", 0))
    assert PEER in resets(small)


def test_draining_worker_loses_its_sequences_at_once() -> None:
    small = SmallCell()
    small.join("r")
    small.submit(1, [1] * 9, max_new=20)
    small.answer()
    small.join("s")
    small.worker(PEER, Drain("rolling update"))
    assert not small.replica("r").running and small.replica("r").pool.held == 0
    assert (PEER, Drain("rolling update")) in small.sent
    assert small.replica("s").running
    small.answer(PEER)  # rows in flight are stale
    small.run()
    assert small.output[1] == [7] * 20 and small.cell.counters.stale_rows
    small.submit(2, [1], max_new=1)
    assert not small.plans[PEER]


def test_only_worker_draining_makes_sequences_wait() -> None:
    small = SmallCell()
    small.join()
    small.submit(1, [1] * 9, max_new=20)
    small.answer()
    small.worker(PEER, Drain("restart"))
    assert small.core.status(small.now).state == "loading" and len(small.cell.waiting) == 1
    small.gone(PEER)
    small.join(peer="w/r/0/2")
    small.run()
    assert small.output[1] == [7] * 20


def test_ranks_gather_into_one_replica() -> None:
    small = SmallCell()
    first, second = "w/r/0/1", "w/r/1/1"
    small.join(peer=first, tp=2, rank=0, num_pages=50)
    assert not small.cell.replicas
    small.submit(1, [1, 2], max_new=6)
    small.join(peer=second, tp=2, rank=1, num_pages=40)
    assert small.replica().pool.usable == 39
    assert [peer for peer, message in small.sent if isinstance(message, WorkerWelcome)] == [first, second]
    assert small.plans[first] == small.plans[second] and small.plans[first]
    small.answer(first)
    assert 1 not in small.output  # the slowest rank counts
    small.answer(second)
    assert small.output[1] == [7]
    small.gone(second)
    assert not small.cell.replicas and first in resets(small)
    small.plans.clear()
    small.join(peer="w/r/0/2", tp=2, rank=0)
    small.join(peer="w/r/1/2", tp=2, rank=1)
    turns = [message.turn for _, message in small.sent if isinstance(message, WorkerWelcome)]
    assert turns[0] == turns[1] != turns[2] == turns[3]
    small.run()
    assert small.output[1] == [7] * 6


def pair(small: SmallCell, **fields: Any) -> tuple[str, str]:
    """A replica of two ranks, with a plan in flight."""
    first, second = "w/r/0/1", "w/r/1/1"
    small.join(peer=first, tp=2, rank=0, **fields)
    small.join(peer=second, tp=2, rank=1, **fields)
    small.submit(1, [1, 2], max_new=6)
    return first, second


def test_ranks_that_sample_different_tokens_start_anew() -> None:
    small = SmallCell()
    first, second = pair(small)
    small.answer(first, token=7)
    small.answer(second, token=8)
    assert not small.cell.replicas and {first, second} <= set(resets(small))
    assert 1 not in small.output


def test_a_rank_cannot_answer_plans_that_it_was_not_sent() -> None:
    small = SmallCell()
    first, _ = pair(small)
    plan = small.plans[first][0]
    for number in range(len(small.replica().in_flight) + 1):
        small.worker(first, StepDone(plan.step + number, i32([7]), b"", 0, b"", b"", b"", 0, b"", b"", 0))
    assert not small.cell.replicas


def test_ranks_of_another_group_never_mix_with_those_of_an_earlier_one() -> None:
    """The group was started again at once: the scheduler has not noticed yet that its old ranks are gone."""
    small = SmallCell()
    first, second = pair(small, group=1)
    small.join(peer="w/r/1/2", tp=2, rank=1, group=2)
    assert not small.cell.replicas and {first, second} <= set(resets(small))
    assert [each.reason for peer, each in resets(small).items() if each.fatal] == []
    small.join(peer="w/r/0/2", tp=2, rank=0, group=2)
    assert small.replica().peers == ["w/r/0/2", "w/r/1/2"]
    small.plans = {peer: plans for peer, plans in small.plans.items() if peer.endswith("/2")}
    small.run()
    assert small.output[1] == [7] * 6


def test_only_pages_that_all_ranks_know_are_known() -> None:
    small = SmallCell()
    a, b = bytes(range(16)), bytes(range(1, 17))
    small.join(peer="w/r/0/1", tp=2, rank=0, inventory=i32([3]) + a + i32([4]) + b)
    small.join(peer="w/r/1/1", tp=2, rank=1, inventory=i32([3]) + a + i32([4]) + a)
    assert len(small.replica().pool.cached) == 1


def test_the_memory_of_a_replica_is_that_of_its_ranks() -> None:
    small = SmallCell()
    first, second = pair(small)
    small.worker(first, WorkerAlive(0, 5, 10, 0.0))
    small.worker(second, WorkerAlive(0, 6, 10, 0.0))
    assert (small.replica().memory_used_bytes, small.replica().memory_total_bytes) == (11, 20)


def test_ranks_must_agree_on_their_number() -> None:
    small = SmallCell()
    small.join(peer="w/r/0/1", tp=2, rank=0)
    small.join(peer="w/r/1/1", tp=3, rank=1)
    assert resets(small)["w/r/1/1"].fatal


def test_new_incarnation_replaces_the_old_one() -> None:
    small = SmallCell()
    small.join()
    small.submit(1, [1, 2], max_new=6)
    small.plans.clear()
    small.join(peer="w/r/0/2")
    assert small.replica().peers == ["w/r/0/2"] and PEER in resets(small)
    small.run()
    assert small.output[1] == [7] * 6


def test_prefix_decides_the_replica_until_the_load_does() -> None:
    small = SmallCell()
    small.join("r")
    small.join("s")
    small.submit(1, PROMPT, max_new=1)
    small.run()
    home = "r" if len(small.replica("r").pool.index) else "s"
    for number in range(2, 5):
        small.submit(number, PROMPT, max_new=1)
        replica = small.seq(number).replica
        assert replica is not None and replica.name == home
        small.run()
    assert small.cell.counters.false_credit_tokens == 0
    for number in range(5, 12):
        small.submit(number, PROMPT, max_new=30)
        for _ in range(2):
            for peer in list(small.plans):
                if small.plans[peer]:
                    small.answer(peer)
    assert small.replica("r").running and small.replica("s").running


def test_larger_replica_takes_what_the_smaller_cannot() -> None:
    small = SmallCell()
    small.join("small", num_pages=6)
    small.join("large", num_pages=40)
    small.submit(1, [1] * 9, max_new=60)
    assert list(small.replica("large").running) == [small.seq(1)]
    small.run()
    assert small.output[1] == [7] * 60


@pytest.mark.parametrize("claim", [{"num_pages": 2**31}, {"num_slots": 2**40}, {"max_model_len": 2**40}, {"tp": 2**20}])
def test_a_worker_that_claims_too_much_is_refused(claim: dict[str, Any]) -> None:
    """Memory is set aside for what a worker says it has: a frame of 60 bytes must not cost gigabytes."""
    small = SmallCell()
    peer = small.join(**claim)
    assert small.cell.replicas == {}
    assert any(to == peer and isinstance(message, Reset) and message.fatal for to, message in small.sent)


def test_an_operator_sends_a_worker_away() -> None:
    small = SmallCell()
    small.join("r")
    small.submit(1, [1, 2, 3], 8)
    small.answer("w/r/0/1")
    small.gateway(DrainWorker(5, "x", "test"))
    small.gateway(DrainWorker(6, "r", "test"))
    answers = [message for _, message in small.sent if isinstance(message, DrainAnswer)]
    assert answers == [DrainAnswer(5, 0, "there is no worker 'x'; connected: r"), DrainAnswer(6, 1, "")]
    assert ("w/r/0/1", Drain("test")) in small.sent and small.replica().draining
    small.worker("w/r/0/1", Drain("told to"))  # what the worker says to that: it is answered, and ends
    assert ("w/r/0/1", Drain("told to")) in small.sent
    small.gone("w/r/0/1")
    small.gateway(DrainWorker(7, "r", "test"))
    assert small.sent[-1][1] == DrainAnswer(7, 0, "there is no worker 'r'; connected: none")
    small.join("s")
    small.run()
    assert small.ends[1] == Finish.LENGTH and small.output[1] == [7] * 8 and small.empty


def test_what_is_remembered_of_dropped_workers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "REMEMBERED_PAGES", 40)
    small = SmallCell()
    for number in range(100):
        small.join(f"r{number}")
        small.submit(number + 1, [number] * 32, 2)
        small.run()
        small.gone(f"w/r{number}/0/1")
    dropped = small.core.workers._dropped
    assert list(dropped) == [f"r{number}" for number in range(95, 100)]
    assert sum(len(each.certain) for each in dropped.values()) == 40

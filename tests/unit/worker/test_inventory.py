"""The inventory names exactly the pages whose content a good, acknowledged plan left behind."""

import random

from gpu_worker.inventory import Inventory
from shared.columns import i32
from shared.messages import StepPlan
from shared.sampling import Sampling
from tests.plan_driver import make_plan


def registration(*pages: int) -> bytes:
    return b"".join(i32([page]) + digest(page) for page in pages)


def digest(page: int, version: int = 0) -> bytes:
    return bytes([page, version]) + bytes(14)


def opening(slot: int, computed: int) -> bytes:
    return i32([slot, computed]) + Sampling().pack()


def pages_of(inventory: Inventory) -> set[int]:
    column = inventory.column()
    return {int.from_bytes(column[start : start + 4], "little") for start in range(0, len(column), 20)}


def test_only_acknowledged_registrations_count() -> None:
    inventory = Inventory(10, 16)
    inventory.on_plan(make_plan(1, opens=opening(1, 0), page_writes=i32([1, 0, 5, 1, 1, 6]), registrations=registration(5)))
    inventory.on_plan(make_plan(2, registrations=registration(6)))
    assert pages_of(inventory) == set()
    inventory.on_done(1)
    assert pages_of(inventory) == {5}
    inventory.on_new_incarnation()
    inventory.on_done(2)
    assert pages_of(inventory) == {5}


def test_a_page_given_to_a_writer_is_forgotten_at_once() -> None:
    inventory = Inventory(10, 16)
    inventory.on_plan(make_plan(1, opens=opening(1, 0), page_writes=i32([1, 0, 5]), registrations=registration(5)))
    inventory.on_plan(make_plan(2, opens=opening(2, 0), page_writes=i32([2, 0, 5])))  # before the first is done
    inventory.on_done(1)
    assert pages_of(inventory) == set()
    inventory.on_done(2)
    inventory.on_plan(make_plan(3, registrations=registration(5)))
    inventory.on_done(3)
    assert pages_of(inventory) == {5}


def test_a_cached_prefix_stays_and_a_copy_target_does_not() -> None:
    inventory = Inventory(10, 16)
    inventory.on_plan(make_plan(1, opens=opening(1, 0), page_writes=i32([1, 0, 5, 1, 1, 6]), registrations=registration(5, 6)))
    inventory.on_done(1)
    inventory.on_plan(make_plan(2, opens=opening(2, 32), page_writes=i32([2, 0, 5, 2, 1, 6, 2, 2, 7])))
    assert pages_of(inventory) == {5, 6}
    inventory.on_plan(make_plan(3, page_copies=i32([5, 6])))
    assert pages_of(inventory) == {5}


def test_random_histories_equal_a_simple_account() -> None:
    """Replay: after any cut, the inventory is what the acknowledged plans registered and no received plan overwrote since."""
    rng = random.Random(2)
    for _ in range(200):
        inventory = Inventory(6, 16)
        plans: list[StepPlan] = []
        for step in range(1, rng.randrange(2, 12)):
            slot, computed = rng.randrange(1, 6), 16 * rng.randrange(3)
            writes = [number for index in range(rng.randrange(4)) for number in (slot, index, rng.randrange(1, 8))]
            plans.append(
                make_plan(
                    step,
                    opens=opening(slot, computed) if rng.random() < 0.7 else b"",
                    page_writes=i32(writes),
                    registrations=b"".join(
                        i32([page]) + digest(page, step) for page in rng.sample(range(1, 8), rng.randrange(3))
                    ),
                )
            )
        num_done = 0
        for received, plan in enumerate(plans, start=1):
            inventory.on_plan(plan)
            while num_done < received - rng.randrange(3):
                num_done += 1
                inventory.on_done(num_done)
        assert inventory.pages == account(plans, num_done)


def account(plans: list[StepPlan], num_done: int) -> dict[int, bytes]:
    known: dict[int, bytes] = {}
    computed = dict.fromkeys(range(6), 0)
    for plan in plans:
        for start in range(0, len(plan.opens), 64):
            slot, tokens = (int.from_bytes(plan.opens[start + at : start + at + 4], "little") for at in (0, 4))
            computed[slot] = tokens
        numbers = [int.from_bytes(plan.page_writes[at : at + 4], "little") for at in range(0, len(plan.page_writes), 4)]
        for at in range(0, len(numbers), 3):
            if numbers[at + 1] * 16 >= computed[numbers[at]]:
                known.pop(numbers[at + 2], None)
        if plan.step <= num_done:
            for start in range(0, len(plan.registrations), 20):
                page = int.from_bytes(plan.registrations[start : start + 4], "little")
                known[page] = plan.registrations[start + 4 : start + 20]
    return known

"""Tenants share what is computed: to the token, by weight, whatever they queue; and nobody waits for ever."""

import random
from collections import Counter

import pytest

from shared.messages import PROTOCOL, Drain, Fault, Finish, GatewayHello
from tests.unit.scheduler.cells import GATEWAY, SmallCell

PEER = "w/r/0/1"


class Crowd(SmallCell):
    """Tenants that always have so many sequences waiting or running."""

    def __init__(self, weights: dict[str, int], backlog: int = 30, **fields: int) -> None:
        super().__init__(**fields)
        self.weights, self.backlog = weights, backlog
        self.random = random.Random(5)
        self.tenants: dict[int, str] = {}
        self.prompts: dict[int, int] = {}  # lengths
        self.lengths: dict[str, tuple[int, int, int]] = {}  # most prompt tokens and output tokens, priority
        self.last_id = 0

    def fill(self, tenant: str) -> None:
        prompt, output, priority = self.lengths.get(tenant, (40, 30, 0))
        live = sum(name == tenant for number, name in self.tenants.items() if number not in self.ends)
        for _ in range(self.backlog - live):
            self.last_id += 1
            self.tenants[self.last_id] = tenant
            tokens = [self.random.randrange(1, 9999) for _ in range(self.random.randint(1, prompt))]
            self.prompts[self.last_id] = len(tokens)
            more = {"tenant": tenant, "weight": self.weights[tenant], "priority": priority}
            self.submit(self.last_id, tokens, self.random.randint(1, output), **more)

    def steps(self, count: int) -> None:
        for _ in range(count):
            for tenant in self.weights:
                self.fill(tenant)
            peer = max(self.plans, key=lambda each: len(self.plans[each]))
            self.answer(peer)

    def used(self) -> Counter[str]:
        """Computed for each tenant since its first account."""
        accounts = self.cell.accounts
        return Counter({name: accounts.of(0, name, weight).num_tokens for name, weight in self.weights.items()})


@pytest.mark.parametrize("weights", [{"a": 1, "b": 3}, {"a": 1, "b": 1, "c": 5}])
def test_backlogs_are_served_by_weight(weights: dict[str, int]) -> None:
    crowd = Crowd(weights)
    crowd.join()
    crowd.lengths["a"] = (60, 5, 0)  # one tenant's requests are nothing like another's
    crowd.steps(1500)
    used = crowd.used()
    for name, weight in weights.items():
        assert used[name] / used.total() == pytest.approx(weight / sum(weights.values()), rel=0.02)


def test_books_balance_to_the_token() -> None:
    """Preemptions, faults, deaths, moves and aborts: every token is charged once, however often it is computed."""
    crowd = Crowd({"a": 1, "b": 2}, backlog=12)
    crowd.join(num_pages=24)
    for name in "stuvwxyz":
        crowd.steps(50)
        live = crowd.cell.gateways[GATEWAY].sequences
        crowd.abort(*[number for number, seq in live.items() if seq.num_output][:3])
        peer = next(iter(crowd.plans))
        if name in "sux":
            crowd.worker(peer, Fault(0, "test"))
        elif name in "tw":
            crowd.worker(peer, Drain("test"))
        crowd.gone(peer)
        crowd.join(name, num_pages=24)
    crowd.weights, weights = {}, crowd.weights
    crowd.run()
    crowd.weights = weights
    counters = crowd.cell.counters
    assert crowd.empty and counters.preemptions and counters.recomputed_tokens and counters.stale_rows
    delivered = sum(map(len, crowd.output.values()))
    assert counters.generated_tokens == delivered
    assert counters.prompt_tokens == sum(crowd.prompts.values())
    assert crowd.used().total() == delivered + counters.prompt_tokens


def test_uncached_prompt_and_output_are_charged() -> None:
    small = SmallCell()
    small.join()
    prompt = list(range(100, 140))
    account = small.cell.accounts.of(0, "a", 1)
    small.submit(1, prompt, 4, tenant="a")
    small.run()
    assert account.num_tokens == 40 + 4
    small.submit(2, prompt, 4, tenant="a")
    small.run()
    assert small.cached[2] == 36 and account.num_tokens == 44 + 4 + 4
    small.submit(3, [*prompt, 1], 4, tenant="a", priority=5)
    small.run()
    assert account.num_tokens == 52, "another class has its own account"
    assert small.cell.accounts.of(5, "a", 1).num_tokens == 1 + 4


def test_what_is_computed_again_is_free() -> None:
    small = SmallCell(credits=1)
    small.join()
    account = small.cell.accounts.of(0, "a", 1)
    small.submit(1, list(range(1, 91)), 6, tenant="a")
    small.answer()  # 64 of its 90 prompt tokens, and the rest is dispatched
    assert account.num_tokens == 90
    small.gone(PEER)
    small.join("s")
    small.run()
    assert small.cell.counters.recomputed_tokens == 90 and account.num_tokens == 96


def test_a_thousand_queued_requests_delay_nobody_else() -> None:
    crowd = Crowd({"a": 1}, backlog=1000, max_queued=2000)
    crowd.join()
    crowd.steps(50)
    waited = []
    for number in range(90_000, 90_020):
        crowd.submit(number, [1, 2, 3], 4, tenant="b")
        for step in range(100):
            if crowd.seq(number).started:
                waited.append(step)
                break
            crowd.steps(1)
        crowd.run_until(lambda number=number: number in crowd.ends)  # type: ignore[misc]
    # All eight slots are a's, outputs are 15 tokens on average: about every second step one is free.
    assert len(waited) == 20 and max(waited) <= 10 and sum(waited) / 20 <= 3


def test_idle_time_is_not_saved_up() -> None:
    crowd = Crowd({"a": 1, "b": 1})
    crowd.join()
    crowd.weights = {"a": 1}
    crowd.steps(600)  # b wants nothing
    crowd.weights = {"a": 1, "b": 1}
    before = crowd.used()
    crowd.steps(600)
    shares = {name: crowd.used()[name] - before[name] for name in before}
    assert shares["a"] / sum(shares.values()) == pytest.approx(0.5, abs=0.03), shares


def test_a_slow_stream_holds_no_account_down() -> None:
    """c has had one stream all the time and little of the cell: who comes after it does not inherit that."""
    crowd = Crowd({"a": 1})
    crowd.join(max_model_len=4096, num_pages=2000)
    crowd.steps(20)
    crowd.submit(90_000, [1], 3000, tenant="c")
    crowd.steps(800)
    assert 90_000 not in crowd.ends and crowd.seq(90_000).started
    crowd.weights = {"a": 1, "d": 1}
    before = crowd.used()
    crowd.steps(600)
    shares = {name: crowd.used()[name] - before[name] for name in before}
    assert shares["a"] / sum(shares.values()) == pytest.approx(0.5, abs=0.05), shares


def test_nobody_starves() -> None:
    """Ten tenants of very different weights and lengths, in one class: what waits longest waits a bounded time."""
    weights = {f"t{number}": 1 + 99 * (number == 0) for number in range(10)}
    crowd = Crowd(weights, backlog=4)
    crowd.join()
    crowd.lengths["t0"] = (64, 40, 0)
    crowd.steps(1500)
    used = crowd.used()
    assert min(used.values()) > 0 and used["t0"] / used.total() < 100 / 109 + 0.05
    for name in weights:
        ended = sum(number in crowd.ends for number, tenant in crowd.tenants.items() if tenant == name)
        assert ended > 0, name


def test_a_better_class_goes_first_and_has_its_own_shares() -> None:
    crowd = Crowd({"a": 1, "b": 1})
    crowd.join()
    crowd.steps(200)
    crowd.lengths["b"] = (40, 30, -1)
    crowd.steps(300)
    urgent = [seq for seq in crowd.replica().running if seq.order[0] == -1]
    assert len(urgent) == crowd.replica().num_slots or len(urgent) >= 7
    crowd.lengths["b"] = (40, 30, 0)
    before = crowd.used()
    crowd.steps(1000)
    shares = {name: crowd.used()[name] - before[name] for name in before}
    assert shares["b"] / sum(shares.values()) > 0.4, "what b used of the better class is not held against it here"


def test_accounts_are_rebuilt_from_what_gateways_resubmit() -> None:
    small = SmallCell()
    small.submit(1, [1, 2, 3, 4], 30, output=[7] * 20, tenant="a", cached=3, age_s=5.0, again=True)
    small.submit(2, [1, 2, 3, 4], 30, output=[7] * 2, tenant="b", cached=0, age_s=5.0, again=True)
    small.submit(3, [1, 2, 3, 5], 30, tenant="b", age_s=5.0, again=True)
    used = {name: small.cell.accounts.of(0, name, 1).num_tokens for name in "ab"}
    assert used == {"a": 1 + 20, "b": 4 + 2}
    small.join()
    small.run()
    used = {name: small.cell.accounts.of(0, name, 1).num_tokens for name in "ab"}
    assert used == {"a": 1 + 30, "b": 4 + 30 + 4 + 30}
    small.now += 30
    small.gateway(GatewayHello(PROTOCOL, "a", "m"), peer="g/a/2")  # a lost connection: nothing is charged again
    small.gateway(small.submission(1, [1, 2, 3, 4], 50, output=[7] * 30, tenant="c", cached=3, age_s=2.0), peer="g/a/2")
    assert small.cell.accounts.of(0, "c", 1).num_tokens == 0


def test_accounts_that_nobody_needs_are_forgotten() -> None:
    small = SmallCell()
    small.join()
    for number in range(1, 300):
        small.submit(number, [number], 2, tenant=f"t{number}")
        small.run()
    assert small.cell.accounts.num_accounts == 299
    small.tick(2.0)
    assert small.cell.accounts.num_accounts == 0


def test_the_wait_that_counts_is_that_of_the_own_queue() -> None:
    """A tenant with a long queue is refused; one that comes with a single request starts soon, and is not."""
    crowd = Crowd({"a": 1}, backlog=60)
    crowd.join()
    for _ in range(300):
        crowd.now += 0.05
        crowd.steps(1)
    crowd.cell.max_wait_s = 2.0
    crowd.submit(90_000, [1], 2, tenant="a")
    crowd.submit(90_001, [1], 2, tenant="b")
    assert "the predicted wait is" in crowd.rejects[90_000].text and "at most 2 s" in crowd.rejects[90_000].text
    assert 90_001 not in crowd.ends
    crowd.steps(30)
    assert crowd.ends[90_001] == Finish.LENGTH


def test_a_full_queue_still_takes_a_share_of_every_tenant() -> None:
    small = SmallCell(max_queued=10)
    for number in range(1, 12):
        small.submit(number, [1, 2], tenant="a")
    assert small.rejects[11].text == "10 sequences are waiting, at most 10 may; the predicted wait is 600.0 s"
    for number in range(21, 32):
        small.submit(number, [1, 2], tenant="b", weight=4)
    assert sorted(small.rejects) == [11, *range(29, 32)], "four fifths of ten"
    assert small.rejects[29].status == 429 and small.rejects[29].retry_after_s == 600
    assert "18 sequences are waiting, at most 10 may; 8 of the sequences are of your tenant" in small.rejects[29].text
    small.join()
    small.run()
    assert small.empty

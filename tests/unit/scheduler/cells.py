"""A small cell for tests of single rules: one call per message, tokens chosen by the test."""

from collections.abc import Callable
from typing import Any

from scheduler.audit import violations
from scheduler.cell import Cell
from scheduler.core import Core
from scheduler.replica import Replica
from scheduler.sequence import Sequence
from shared.columns import i32, i64, read_i32, read_i64
from shared.messages import PROTOCOL, Abort, GatewayHello, PromptScores, Reject, StepDone, StepPlan, Submit, Tokens, WorkerHello
from shared.pages import page_hashes, root_hash
from shared.sampling import Sampling

KEY = bytes(32)
GATEWAY = "g/a/1"


class SmallCell:
    """Time stands still unless a test moves now. Every message is followed by a pump."""

    def __init__(self, *, page_tokens: int = 4, credits: int = 2, max_queued: int = 1000) -> None:
        self.page_tokens = page_tokens
        self.cell = Cell(
            page_tokens=page_tokens, hash_key=KEY, epoch=1, credits=credits, max_queued=max_queued, step_timeout_s=10.0
        )
        self.core = Core(self.cell)
        self.now = 100.0
        self.plans: dict[str, list[StepPlan]] = {}  # by worker peer, not answered yet
        self.output: dict[int, list[int]] = {}
        self.ends: dict[int, int | str] = {}
        self.rejects: dict[int, Reject] = {}
        self.cached: dict[int, int] = {}  # by sequence, at its start
        self.scores: dict[int, int] = {}
        self.sent: list[tuple[str, Any]] = []  # everything that is no plan
        self.gateway(GatewayHello(PROTOCOL, "a", "m"))

    # --- peers ------------------------------------------------------------------------------------------------------------

    def gateway(self, message: Any, peer: str = GATEWAY) -> None:
        self._take(self.core.on_gateway(peer, message, self.now))
        self.pump()

    def worker(self, peer: str, message: Any) -> None:
        self._take(self.core.on_worker(peer, message, self.now))
        self.pump()

    def gone(self, peer: str) -> None:
        self.plans.pop(peer, None)
        self._take(self.core.on_gone(peer, "test", self.now))
        self.pump()

    def pump(self) -> None:
        self._take(self.core.pump(self.now))
        for replica in self.cell.replicas.values():
            assert violations(replica) == []

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self._take(self.core.tick(self.now))
        self.pump()

    def _take(self, out: list[tuple[str, Any]]) -> None:
        for peer, message in out:
            match message:
                case StepPlan():
                    self.plans.setdefault(peer, []).append(message)
                    continue
                case Tokens():
                    for number, token in zip(read_i64(message.ids), read_i32(message.tokens), strict=True):
                        self.output.setdefault(number, []).append(token)
                    for number, cached in zip(read_i64(message.started_ids), read_i32(message.started_cached), strict=True):
                        self.cached[number] = cached
                    for number, reason in zip(read_i64(message.finished_ids), message.finished_reasons, strict=True):
                        assert number not in self.ends
                        self.ends[number] = reason
                case Reject():
                    assert message.id not in self.ends
                    self.ends[message.id] = message.code
                    self.rejects[message.id] = message
                case PromptScores():
                    self.scores[message.id] = self.scores.get(message.id, 0) + len(message.logprobs) // 4
            self.sent.append((peer, message))

    def join(self, name: str = "r", peer: str = "", **fields: Any) -> str:
        """A worker says hello; returns its peer."""
        peer = peer or f"w/{name}/0/1"
        self.plans[peer] = []
        self.worker(peer, self.hello(name, **fields))
        return peer

    def hello(self, name: str = "r", **fields: Any) -> WorkerHello:
        values: dict[str, Any] = {
            "protocol": PROTOCOL,
            "replica": name,
            "rank": 0,
            "tp": 1,
            "group": 0,
            "model": "m",
            "page_tokens": self.page_tokens,
            "num_pages": 65,
            "num_slots": 9,
            "max_batched_tokens": 64,
            "max_model_len": 128,
            "inventory": b"",
        }
        return WorkerHello(**{**values, **fields})

    def submission(
        self, number: int, prompt: list[int], max_new: int = 4, output: list[int] | None = None, **fields: Any
    ) -> Submit:
        tokens = i32(prompt + (output or []))
        root = root_hash(KEY, "")
        values: dict[str, Any] = {
            "id": number,
            "tokens": tokens,
            "num_prompt": len(prompt),
            "max_new": max_new,
            "min_new": 0,
            "stop_ids": b"",
            "sampling": Sampling(num_prompt=len(prompt), score_width=fields.pop("score_width", -1)).pack(),
            "edits": b"",
            "root_hash": root,
            "page_hashes": page_hashes(KEY, root, tokens, self.page_tokens),
            "priority": 0,
            "tenant": "",
            "age_s": 0.0,
            "deadline_s": 0.0,
        }
        return Submit(**{**values, **fields})

    def submit(self, number: int, prompt: list[int], max_new: int = 4, **fields: Any) -> None:
        self.gateway(self.submission(number, prompt, max_new, **fields))

    def abort(self, *numbers: int) -> None:
        self.gateway(Abort(i64(numbers), "test"))

    # --- results ----------------------------------------------------------------------------------------------------------

    def answer(self, peer: str = "w/r/0/1", token: int = 7, step_us: int = 0) -> StepPlan:
        """The oldest plan of this worker is done; every sampled row gets this token."""
        plan = self.plans[peer].pop(0)
        scored = len(plan.score_positions) // 4
        sampled = plan.num_last + plan.num_decode
        width = plan.score_width if scored else 0
        zeros = bytes(4 * scored * width)
        scores = bytes(4 * scored)
        done = StepDone(plan.step, i32([token] * sampled), b"", 0, b"", b"", scores, width, zeros, zeros, step_us)
        self.worker(peer, done)
        return plan

    def run(self, limit: int = 5000) -> None:
        """Answer plans, oldest worker first, until there are none."""
        for _ in range(limit):
            busy = [peer for peer, plans in self.plans.items() if plans]
            if not busy:
                return
            self.answer(busy[0])
        raise AssertionError("it never ends")

    def run_until(self, condition: Callable[[], object], peer: str = "w/r/0/1") -> None:
        for _ in range(5000):
            if condition():
                return
            self.answer(peer)
        raise AssertionError("it never happens")

    # --- state ------------------------------------------------------------------------------------------------------------

    def seq(self, number: int, peer: str = GATEWAY) -> Sequence:
        return self.cell.gateways[peer].sequences[number]

    def replica(self, name: str = "r") -> Replica:
        return self.cell.replicas[name]

    @property
    def empty(self) -> bool:
        nothing = not len(self.cell.waiting) and not any(outbox.sequences for outbox in self.cell.gateways.values())
        return nothing and not any(replica.running or replica.pool.held for replica in self.cell.replicas.values())


def rows_of(plan: StepPlan) -> dict[int, int]:
    """Slot -> length of every row."""
    slots, lens = read_i32(plan.row_slots).tolist(), read_i32(plan.row_lens).tolist()
    return dict(zip(slots, lens + [1] * plan.num_decode, strict=True))

"""One choice of one request: its tokens, its place in the queue, and what it holds while it is bound to a replica."""

from array import array
from typing import TYPE_CHECKING

from shared.messages import Submit
from shared.pages import HASH_BYTES, page_hash
from shared.sampling import Flag, Sampling

if TYPE_CHECKING:
    from scheduler.accounts import Account
    from scheduler.outbox import Outbox
    from scheduler.replica import Replica

MAX_PREEMPTIONS = 4  # after so many its worst case is set aside before it runs again, so there is no fifth

Order = tuple[int, float, int]  # (priority, arrival in seconds, serial): total and unique


class Sequence:
    """known = len(tokens). While bound:

    tokens: [0, cached) shared, read only   [cached, computed) ours, written or in flight   [computed, prefill_len) to do
    planned = known + sampled rows in flight. Once the prefill is dispatched every plan adds one sampled row, until end_len.
    """

    __slots__ = (
        "account",
        "alone_until",
        "bound_at",
        "charged",
        "check_at",
        "choice",
        "computed",
        "computed_before",
        "deadline",
        "edits",
        "end_len",
        "event_at",
        "first_at",
        "first_cached",
        "generation",
        "group_page",
        "hashes",
        "id",
        "max_new",
        "min_new",
        "needs_history",
        "num_binds",
        "num_cached",
        "num_prompt",
        "num_registered",
        "order",
        "outbox",
        "pages",
        "pardons",
        "planned",
        "preemptions",
        "prefill_len",
        "private",
        "queued_at",
        "replica",
        "request",
        "root_hash",
        "sampling",
        "score_width",
        "scored",
        "slot",
        "started",
        "stop_ids",
        "stream",
        "strikes",
        "struck_len",
        "tenant",
        "ticket",
        "tokens",
        "top_width",
        "trace",
        "turn",
        "worker",
        "worst_pages",
    )

    def __init__(self, submit: Submit, outbox: "Outbox", account: "Account", order: Order, deadline: float) -> None:
        """submit must have been checked (scheduler.admission)."""
        self.id = submit.id
        self.outbox = outbox
        self.account = account
        self.order = order
        self.deadline = deadline  # clock time, 0.0: none
        self.tokens = array("i", submit.tokens)
        self.num_prompt = submit.num_prompt
        self.max_new = submit.max_new
        self.min_new = submit.min_new
        self.stop_ids = frozenset(memoryview(submit.stop_ids).cast("i"))
        self.sampling = submit.sampling
        self.edits = submit.edits
        self.tenant = submit.tenant
        self.stream = submit.stream
        self.turn = submit.turn
        self.choice = submit.choice
        self.ticket = submit.ticket
        self.request = submit.request
        self.trace = submit.trace
        self.first_cached = submit.cached  # prompt tokens found in a cache at its first start; -1: not started
        self.root_hash = submit.root_hash
        column = submit.page_hashes
        self.hashes = [column[at : at + HASH_BYTES] for at in range(0, len(column), HASH_BYTES)]
        sampling = Sampling.unpack(submit.sampling)
        self.needs_history = bool(sampling.flags & Flag.NEEDS_HISTORY)
        self.top_width = sampling.logprobs  # -1: no log-probabilities
        self.score_width = sampling.score_width
        # Prompt tokens whose score was delivered; a sequence that has output has all of them already.
        self.scored = 1 if sampling.score_width >= 0 and len(self.tokens) == self.num_prompt else self.num_prompt
        self.end_len = self.num_prompt + self.max_new  # tokens in all at which it ends; lowered to what fits when bound
        self.charged = self.num_prompt if self.num_output else 0  # prompt tokens that need not be paid for again
        self.generation = 0  # grows with every release: results of earlier rows are stale
        self.preemptions = 0
        self.strikes = 0
        self.pardons = 0  # strikes taken back
        self.struck_len = 0  # known when it was struck last
        self.alone_until = 0  # while known is below, its plans carry nothing else
        self.started = submit.cached >= 0  # here, or under an earlier scheduler or gateway
        self.computed_before = 0  # tokens computed before the last release: what is computed again was lost
        self.queued_at = 0.0  # clock times: it came
        self.bound_at = 0.0  # it entered a plan for the first time
        self.first_at = 0.0  # the first result of its rows that is a token
        self.num_binds = 0
        self.worker = ""  # name of the replica that had it last
        self._unbind()

    def _unbind(self) -> None:
        self.replica: Replica | None = None
        self.slot = 0
        self.pages: list[int] = []
        self.num_cached = 0
        self.computed = 0
        self.prefill_len = 0
        self.planned = len(self.tokens)
        self.num_registered = 0
        self.group_page = 0  # of decode rows: see groups.group_page
        self.private = False  # met an identical page: registers nothing more
        self.event_at = 0  # value of planned at which the planner must look: page full or end reached
        self.check_at = 0  # value of known at which the commit must look: page to register or end reached
        self.worst_pages = 0

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def begun(self) -> bool:
        """It has started, here or under an earlier scheduler."""
        return self.started or self.num_output > 0

    @property
    def prefill_left(self) -> int:
        return self.prefill_len - self.computed

    @property
    def guaranteed(self) -> bool:
        """Its worst case is reserved, it is never a victim."""
        return self.preemptions >= MAX_PREEMPTIONS

    @property
    def alone(self) -> bool:
        return len(self.tokens) < self.alone_until

    @property
    def wasteful_to_stop(self) -> bool:
        """All its rows are in flight; it ends by itself."""
        return self.replica is not None and self.prefill_left == 0 and self.planned >= self.end_len

    def charge_prefill(self, start: int, end: int) -> None:
        """Known tokens start .. end - 1 are computed now. Output among them was paid for when it was generated."""
        end = min(end, self.num_prompt)
        if end > max(start, self.charged):
            self.account.charge(end - max(start, self.charged))
            self.charged = end

    def note_bind(self, worker: str, now: float) -> None:
        self.bound_at = self.bound_at or now
        self.num_binds += 1
        self.worker = worker

    def unbind(self) -> None:
        """Forget the binding; rows in flight turn stale. Only Replica.release calls this, it frees what was held."""
        done = min(self.planned - 1, len(self.tokens)) if self.prefill_left == 0 else self.computed
        self.computed_before = max(self.computed_before, done)
        self.generation += 1
        self._unbind()

    def hash_pages(self, count: int, key: bytes, page_tokens: int) -> list[bytes]:
        """Hashes of (at least) the first count full pages; their tokens must be known."""
        hashes = self.hashes
        while len(hashes) < count:
            at = len(hashes) * page_tokens
            parent = hashes[-1] if hashes else self.root_hash
            hashes.append(page_hash(key, parent, self.tokens[at : at + page_tokens].tobytes()))
        return hashes

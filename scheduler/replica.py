"""All state of one copy of the model: pages, prefix index, slots, bound sequences, plans in flight."""

from array import array
from collections import Counter, deque
from typing import NamedTuple

from scheduler.accounts import Account
from scheduler.chunk_budget import ChunkBudget
from scheduler.groups import arrange, group_page
from scheduler.page_pool import PagePool
from scheduler.prefix_index import PrefixIndex
from scheduler.sequence import Sequence
from shared.messages import StepDone, WorkerHello


class DecodeRows(NamedTuple):
    """Decode rows of a plan. Shared by every plan until a sequence joins, leaves or is parked; never changed."""

    sequences: list[Sequence]
    generations: list[int]
    tally: list[tuple[Account, int]]  # how many of them belong to each account
    slots: bytes  # i32 column
    group_counts: bytes


class Score(NamedTuple):
    """Score rows of one sequence in a plan: log-probabilities of tokens start .. start + num_tokens - 1."""

    sequence: Sequence
    generation: int
    start: int
    num_tokens: int


class Flight(NamedTuple):
    """What was recorded about a plan when it was sent; its results belong to this and never to slots."""

    step: int
    sequences: list[Sequence]  # of sampled rows
    generations: list[int]  # of sequences, when the plan was sent
    tally: list[tuple[Account, int]]  # how many of sequences belong to each account
    chunks: list[tuple[Sequence, int]]  # (sequence, generation) of rows that are not sampled
    ends: list[tuple[Sequence, int]]  # those of chunks that end with this plan: they want no output
    scores: list[Score]
    registered: set[int]  # pages whose content is only trusted once this plan is acknowledged
    num_prefill_tokens: int
    num_decode: int

    @property
    def live(self) -> list[Sequence]:
        """Sequences of all rows that are still bound as they were."""
        pairs = [*self.chunks, *zip(self.sequences, self.generations, strict=True)]
        return [seq for seq, generation in pairs if seq.generation == generation]


class Replica:
    __slots__ = (
        "alone",
        "chunk_budget",
        "credits",
        "decoding",
        "draining",
        "guaranteed_pages",
        "hash_key",
        "heard",
        "in_flight",
        "max_batched_tokens",
        "max_model_len",
        "memory_bytes",
        "model",
        "name",
        "num_slots",
        "oldest_since",
        "page_tokens",
        "peers",
        "pool",
        "prefilling",
        "refused",
        "rows",
        "running",
        "slots",
        "worst_pages",
    )

    def __init__(self, hellos: list[WorkerHello], peers: list[str], hash_key: bytes, credits: int, now: float) -> None:
        """hellos and peers: of all ranks, by rank. Ranks hold the same pages, each a share of the heads."""
        first = hellos[0]
        self.name = first.replica
        self.model = first.model
        self.page_tokens = first.page_tokens
        self.peers = peers
        self.hash_key = hash_key
        self.credits = credits
        self.max_batched_tokens = min(hello.max_batched_tokens for hello in hellos)
        self.max_model_len = min(hello.max_model_len for hello in hellos)
        self.pool = PagePool(min(hello.num_pages for hello in hellos), PrefixIndex())
        # Every running sequence may need a decode row in every plan.
        self.num_slots = min(min(hello.num_slots for hello in hellos) - 1, self.max_batched_tokens)
        self.slots = list(range(self.num_slots, 0, -1))  # free ones, a stack
        self.running: dict[Sequence, None] = {}  # all bound sequences; the next two are parts of it
        self.prefilling: dict[Sequence, None] = {}
        self.decoding: dict[Sequence, None] = {}  # get a row in the next plan; a parked one waits for rows in flight only
        self.rows: DecodeRows | None = None  # of decoding; None: to be arranged anew
        self.in_flight: deque[Flight] = deque()
        self.oldest_since = now  # when the oldest plan in flight became the oldest
        self.draining = False
        self.alone: Sequence | None = None  # a struck sequence whose rows must be alone in flight
        self.refused: Sequence | None = None  # did not fit; cannot fit before something is released
        self.worst_pages = 0  # sum over running of the most they may ever hold
        self.guaranteed_pages = 0  # still set aside for guaranteed sequences
        self.chunk_budget = ChunkBudget(self.max_batched_tokens)
        self.memory_bytes = dict.fromkeys(peers, (0, 0))  # (used, in all) of each rank's device
        # Results by rank, of steps that a slower rank has not answered; a single rank's are never kept.
        self.heard: dict[str, deque[StepDone]] = {peer: deque() for peer in peers}

    @property
    def pool_tokens(self) -> int:
        return self.pool.usable * self.page_tokens

    @property
    def memory_used_bytes(self) -> int:
        return sum(used for used, _ in self.memory_bytes.values())

    @property
    def memory_total_bytes(self) -> int:
        return sum(total for _, total in self.memory_bytes.values())

    @property
    def limit(self) -> int:
        """Most tokens of one sequence, prompt and output."""
        return min(self.max_model_len, self.pool_tokens)

    @property
    def backlog(self) -> int:
        """Prefill tokens bound here and not dispatched."""
        return sum(seq.prefill_len - seq.computed for seq in self.prefilling)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def match(self, seq: Sequence) -> list[int]:
        """Indexed pages of the longest known prefix. The last known token is always computed, a scored prompt entirely."""
        if seq.score_width >= 0:
            return []
        limit = (len(seq.tokens) - 1) // self.page_tokens
        return self.pool.index.match(seq.hash_pages(limit, self.hash_key, self.page_tokens), limit)

    # --- acquire and release ------------------------------------------------------------------------------------------

    def bind(self, seq: Sequence, matched: list[int]) -> None:
        """Take a slot and the pages of all known tokens. There must be room (router.has_room)."""
        seq.replica = self
        seq.end_len = min(seq.num_prompt + seq.max_new, self.limit)
        seq.prefill_len = seq.planned = len(seq.tokens)
        seq.num_registered = len(matched)
        seq.num_cached = seq.computed = len(matched) * self.page_tokens
        self.pool.share(matched)
        seq.pages = matched
        seq.slot = self.slots.pop()
        seq.worst_pages = self.pages_for(seq.end_len)
        self.worst_pages += seq.worst_pages
        if seq.guaranteed:
            self.guaranteed_pages += seq.worst_pages - len(matched)
        for _ in range(self.pages_for(seq.prefill_len) - len(matched)):
            self._take_page(seq)
        self._set_events(seq)
        self.running[seq] = None
        self.prefilling[seq] = None
        if seq.alone:
            self.alone = seq

    def release(self, seq: Sequence) -> None:
        """The only way out: slot and pages are free for the next plan at once, rows in flight turn stale."""
        assert seq.replica is self, f"sequence {seq.id} is not bound to {self.name}"
        self.pool.drop(seq.pages)
        self.slots.append(seq.slot)
        del self.running[seq]
        self.prefilling.pop(seq, None)
        self.leave_decoding(seq)
        self.worst_pages -= seq.worst_pages
        if seq.guaranteed:
            self.guaranteed_pages -= seq.worst_pages - len(seq.pages)
        if self.alone is seq:
            self.alone = None
        self.refused = None
        seq.unbind()

    def grow(self, seq: Sequence) -> bool:
        """One more page, unless the pages left are set aside for others."""
        set_aside = 0 if seq.guaranteed else self.guaranteed_pages
        if self.pool.available <= set_aside:
            return False
        self._take_page(seq)
        self._set_events(seq)
        return True

    def _take_page(self, seq: Sequence) -> None:
        seq.pages.append(self.pool.take())
        if seq.guaranteed:
            self.guaranteed_pages -= 1

    def _set_events(self, seq: Sequence) -> None:
        seq.event_at = min(seq.end_len, len(seq.pages) * self.page_tokens + 1)
        seq.check_at = seq.end_len
        if not seq.private:  # the next page is complete when the token after its last is known
            seq.check_at = min(seq.end_len, (seq.num_registered + 1) * self.page_tokens + 1)

    # --- decode rows ----------------------------------------------------------------------------------------------------

    def join_decoding(self, seq: Sequence) -> None:
        """Its prefill is dispatched to the end: from the next plan on it has a row in every plan."""
        del self.prefilling[seq]
        seq.group_page = group_page(seq)
        self.decoding[seq] = None
        self.rows = None

    def leave_decoding(self, seq: Sequence) -> None:
        if seq in self.decoding:
            del self.decoding[seq]
            self.rows = None

    def decode_rows(self) -> DecodeRows:
        if self.rows is None:
            sequences, group_counts = arrange(self.decoding)
            slots = array("i", [seq.slot for seq in sequences]).tobytes()
            tally = list(Counter([seq.account for seq in sequences]).items())
            self.rows = DecodeRows(sequences, [seq.generation for seq in sequences], tally, slots, group_counts)
        return self.rows

    # --- prefix index -------------------------------------------------------------------------------------------------

    def register(self, seq: Sequence, num_tokens: int) -> None:
        """Index its full pages within the first num_tokens tokens, which must be known and written or in flight."""
        count = num_tokens // self.page_tokens
        if seq.private or count <= seq.num_registered:
            self._set_events(seq)
            return
        index = self.pool.index
        hashes = seq.hash_pages(count, self.hash_key, self.page_tokens)
        for at in range(seq.num_registered, count):
            page, known = seq.pages[at], index.page_of.get(hashes[at])
            if known is None:
                index.add(page, hashes[at])
            elif known != page:  # an identical page is indexed: keep our own, register nothing more
                seq.private = True
                break
            seq.num_registered = at + 1
        self._set_events(seq)

    def acknowledged(self) -> dict[int, bytes]:
        """Indexed pages that no plan in flight (and none to come) has still to write: what survives a failure."""
        index = self.pool.index
        doubtful = set(index.news).union(*(flight.registered for flight in self.in_flight))
        return {page: page_hash for page, page_hash in index.hash_of.items() if page not in doubtful}

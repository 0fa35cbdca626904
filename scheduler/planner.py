"""Decides what the next plans compute: decode rows first, then prefill chunks within a token budget per plan."""

from scheduler.cell import Cell
from scheduler.plan import NO_ROWS, PlanBuilder
from scheduler.replica import DecodeRows, Replica
from scheduler.router import Place, best_place
from scheduler.sequence import Sequence
from shared.columns import i32
from shared.messages import StepPlan

AGING_TOKENS_PER_S = 1024.0  # a prompt of 30,000 tokens waits at most 30 s for shorter ones that came later

Urgency = tuple[int, float]  # (priority, tokens), lower is sooner


def plan_round(cell: Cell, now: float) -> list[tuple[Replica, StepPlan]]:
    """One plan for every replica that has a credit left and something to compute."""
    drained = _place_alone(cell, now)
    plans: list[tuple[Replica, StepPlan]] = []
    builders: dict[Replica, PlanBuilder] = {}
    for replica in cell.replicas.values():
        if len(replica.in_flight) >= replica.credits or replica is drained:
            continue
        if replica.alone is not None:
            plan = _plan_alone(cell, replica)
            if plan is not None:
                plans.append((replica, plan))
        elif replica.running or cell.waiting:
            builders[replica] = builder = PlanBuilder(replica, 0)
            _grow_decode_rows(cell, builder)
    queued = cell.waiting.num_tokens // max(len(cell.replicas), 1)
    for replica, builder in builders.items():
        waiting = queued + replica.backlog
        builder.budget = replica.chunk_budget.tokens(len(replica.decoding), waiting)
        builder.crowded = replica.chunk_budget.crowded(waiting)
        builder.room = replica.max_batched_tokens - len(replica.decoding)
    if cell.waiting:
        _admit(cell, builders, now)
    for replica, builder in builders.items():
        _add_prefills(builder, None, now)
        plan = _build(cell, builder, replica.decode_rows())
        if plan is not None:
            plans.append((replica, plan))
    return plans


def _build(cell: Cell, builder: PlanBuilder, decode: DecodeRows) -> StepPlan | None:
    replica = builder.replica
    if not builder.prefills and not decode.sequences:
        return None
    cell.last_step += 1
    cell.counters.steps += 1
    plan = builder.build(cell.last_step, decode)
    for seq in decode.sequences:
        seq.planned += 1
    for row in builder.prefills:
        seq = row.sequence
        if row.sampled:  # its decode rows start with the next plan
            seq.planned += 1
            replica.join_decoding(seq)
        elif seq.prefill_left == 0:
            del replica.prefilling[seq]
    return plan


# --- decode rows --------------------------------------------------------------------------------------------------------


def _grow_decode_rows(cell: Cell, builder: PlanBuilder) -> None:
    """Every decode row has the cell its input token is written to, or it leaves: parked at its end, or preempted."""
    replica = builder.replica
    due = [seq for seq in replica.decoding if seq.planned == seq.event_at]
    if len(due) > 1:
        due.sort(key=lambda seq: seq.order)
    for seq in due:
        if seq not in replica.decoding:  # it was the victim of an earlier one
            continue
        if seq.planned >= seq.end_len:
            replica.leave_decoding(seq)
        elif _grow(cell, replica, seq):
            builder.grown.append((seq, seq.generation, len(seq.pages) - 1))


def _grow(cell: Cell, replica: Replica, seq: Sequence) -> bool:
    """One page more; False: it was itself the one to give way."""
    while not replica.grow(seq):
        victim = max((each for each in replica.running if _may_stop(each)), key=lambda each: each.order)
        cell.preempt(victim)
        if victim is seq:
            return False
    return True


def _may_stop(seq: Sequence) -> bool:
    return not seq.guaranteed and not seq.wasteful_to_stop


# --- prefill rows -------------------------------------------------------------------------------------------------------


def _urgency(seq: Sequence, num_tokens: int, now: float) -> Urgency:
    """Shortest remaining prefill first, with aging."""
    return (seq.order[0], num_tokens - AGING_TOKENS_PER_S * (now - seq.order[1]))


def _add_prefills(builder: PlanBuilder, before: Urgency | None, now: float) -> None:
    """Chunks of bound prefills, the most urgent first; only those more urgent than before, unless None."""
    if builder.budget <= 0 or not builder.replica.prefilling:
        return
    chosen = {row.sequence for row in builder.prefills}
    bound = [(_urgency(seq, seq.prefill_left, now), seq.order, seq) for seq in builder.replica.prefilling if seq not in chosen]
    for urgency, _, seq in sorted(bound):
        if builder.budget <= 0 or (before is not None and urgency >= before):
            return
        builder.add_prefill(seq)


def _admit(cell: Cell, builders: dict[Replica, PlanBuilder], now: float) -> None:
    """Bind waiting sequences that can enter one of these plans."""
    elsewhere: set[Sequence] = set()  # best where no plan is being made; the others only get fuller in this round
    while (choice := _choose(cell, builders, elsewhere, now)) is not None:
        seq, place, urgency = choice
        builder = builders[place.replica]
        _add_prefills(builder, urgency, now)
        if builder.budget > 0 and not builder.piece(len(seq.tokens) - len(place.matched) * place.replica.page_tokens):
            builder.budget = 0
        if builder.budget > 0:
            _bind(cell, seq, place, now)
            builder.opened.append(seq)
            builder.add_prefill(seq)


def _choose(
    cell: Cell, builders: dict[Replica, PlanBuilder], elsewhere: set[Sequence], now: float
) -> tuple[Sequence, Place, Urgency] | None:
    """The first waiting sequence, or a shorter one behind it when it would not fit into its plan anyway."""
    best: tuple[Sequence, Place, Urgency] | None = None
    if not any(builder.budget > 0 for builder in builders.values()):
        return None
    for seq in cell.waiting.window():
        if seq in elsewhere:
            continue
        place = best_place(cell, seq) or _make_room(cell, builders, seq)
        if place is None:  # nobody passes one that lacks room, or it would wait for ever
            break
        builder = builders.get(place.replica)
        if builder is None or builder.budget <= 0:  # its place has no credit now; it will soon
            elsewhere.add(seq)
            continue
        num_tokens = len(seq.tokens) - len(place.matched) * place.replica.page_tokens
        urgency = _urgency(seq, num_tokens, now)
        if best is None and num_tokens <= builder.budget:
            return seq, place, urgency
        if best is None or urgency < best[2]:
            best = (seq, place, urgency)
    return best


def _bind(cell: Cell, seq: Sequence, place: Place, now: float) -> None:
    """The one place where a waiting sequence gets a replica."""
    replica, counters = place.replica, cell.counters
    matched = replica.match(seq)
    counters.false_credit_tokens += max(len(place.matched) - len(matched), 0) * replica.page_tokens
    cell.waiting.take(seq)
    replica.bind(seq, matched)
    seq.note_bind(replica.name, now)
    counters.hit_tokens += seq.num_cached
    counters.lookup_tokens += len(seq.tokens)
    counters.recomputed_tokens += max(seq.computed_before - seq.num_cached, 0)
    if not seq.started:
        seq.started = True
        cell.note_start(now)
        counters.prompt_tokens += seq.num_prompt
        seq.outbox.started_ids.append(seq.id)
        seq.first_cached = min(seq.num_cached, seq.num_prompt)
        seq.outbox.started_cached.append(seq.first_cached)


def _make_room(cell: Cell, builders: dict[Replica, PlanBuilder], seq: Sequence) -> Place | None:
    """Preempt sequences of less urgent classes, where stopping them all would let this one in."""
    for replica, builder in builders.items():
        taken = {row.sequence for row in builder.prefills}  # rows of this plan stay
        victims = [each for each in replica.running if each.order[0] > seq.order[0] and _may_stop(each) and each not in taken]
        freed = sum(len(victim.pages) for victim in victims)
        if not victims or replica.pool.available + freed < replica.pages_for(len(seq.tokens)):
            continue
        for victim in sorted(victims, key=lambda each: each.order, reverse=True):
            cell.preempt(victim)
            place = best_place(cell, seq)
            if place is not None:
                return place
    return None


# --- one struck sequence by itself ----------------------------------------------------------------------------------------


def _place_alone(cell: Cell, now: float) -> Replica | None:
    """Bind the queue's head to an empty pipeline if it must run alone; returns the replica that has to drain for it."""
    head = cell.waiting.head
    if head is None or not head.alone:
        return None
    place = best_place(cell, head)
    if place is None:
        return None
    if place.replica.in_flight or place.replica.alone is not None:
        return place.replica if place.replica.alone is None else None
    _bind(cell, head, place, now)
    return None


def _plan_alone(cell: Cell, replica: Replica) -> StepPlan | None:
    """Nothing else is in flight, so whatever goes wrong is its own doing."""
    seq = replica.alone
    assert seq is not None
    if replica.in_flight:
        return None
    builder = PlanBuilder(replica, replica.max_batched_tokens)
    if seq.computed == seq.num_cached and seq.prefill_left > 0:
        builder.opened.append(seq)
    if seq.prefill_left > 0:
        builder.add_prefill(seq)
        return _build(cell, builder, NO_ROWS)
    if seq.planned == seq.event_at:
        if not _grow(cell, replica, seq):
            return None
        builder.grown.append((seq, seq.generation, len(seq.pages) - 1))
    row = DecodeRows([seq], [seq.generation], [(seq.account, 1)], i32([seq.slot]), b"")
    return _build(cell, builder, row)

"""Which replica a sequence should run on. One unit: tokens to compute before it gets its first one."""

from typing import NamedTuple

from scheduler.cell import Cell
from scheduler.forecast import peak_pages
from scheduler.replica import Replica
from scheduler.sequence import Sequence

DECODE_ROW_TOKENS = 16  # what one decode row of a replica costs a newcomer
EVICTED_SHARE = 4  # one of so many evicted pages would have been hit again


class Place(NamedTuple):
    replica: Replica
    matched: list[int]  # pages of the prefix it holds
    cost: int  # tokens


def has_room(cell: Cell, replica: Replica, seq: Sequence, matched: list[int]) -> bool:
    """It can be bound now, and nobody is expected to be preempted for it."""
    seq.end_len = min(seq.num_prompt + seq.max_new, cell.limit)
    if seq.end_len > replica.limit:
        return False
    pool = replica.pool
    spare = pool.available - pool.num_unowned(matched) - replica.guaranteed_pages
    num_fresh = replica.pages_for(len(seq.tokens)) - len(matched)
    worst_pages = replica.pages_for(seq.end_len)
    if seq.guaranteed:
        fits = spare >= worst_pages - len(matched)
    elif spare < num_fresh or not replica.running:
        fits = spare >= num_fresh
    else:
        fits = _growth_fits(cell, replica, seq, spare, num_fresh, worst_pages)
    if not fits:
        replica.refused = seq
    return fits


def _growth_fits(cell: Cell, replica: Replica, seq: Sequence, spare: int, num_fresh: int, worst_pages: int) -> bool:
    """Cheap proofs first; the forecast only when pages are scarce."""
    if replica.worst_pages + worst_pages <= replica.pool.usable:
        return True
    most_growth = replica.pages_for(cell.lengths.longest) + 1
    if spare - num_fresh >= (len(replica.running) + 1) * most_growth:
        return True
    return peak_pages(replica, seq, num_fresh, cell.lengths) <= replica.pool.usable


def cost_tokens(replica: Replica, seq: Sequence, matched: list[int]) -> int:
    uncached = len(seq.tokens) - len(matched) * replica.page_tokens
    num_fresh = replica.pages_for(len(seq.tokens)) - len(matched)
    evicted = max(num_fresh - len(replica.pool.free), 0)
    return (
        replica.backlog + uncached + DECODE_ROW_TOKENS * len(replica.running) + evicted * replica.page_tokens // EVICTED_SHARE
    )


def best_place(cell: Cell, seq: Sequence) -> Place | None:
    """The cheapest replica with room; None: nowhere now. Not necessarily one that can plan at this moment."""
    best: Place | None = None
    for replica in cell.replicas.values():
        if replica.draining or not replica.slots or replica.refused is seq:
            continue
        matched = replica.match(seq)
        if not has_room(cell, replica, seq, matched):
            continue
        cost = cost_tokens(replica, seq, matched)
        if best is None or cost < best.cost:
            best = Place(replica, matched, cost)
    return best

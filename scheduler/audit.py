"""Checks that every page of a replica is exactly one of free, cached, held, and repairs the books if not."""

import logging
from collections import Counter

from scheduler.cell import Cell
from scheduler.replica import Replica

log = logging.getLogger("quire.scheduler")


def sums(replica: Replica) -> list[str]:
    """What can be checked in no time."""
    found: list[str] = []
    pool = replica.pool
    if replica.num_slots != len(replica.slots) + len(replica.running):
        found.append(f"slots: {replica.num_slots} != {len(replica.slots)} free + {len(replica.running)} running")
    if not replica.running and pool.available != pool.usable:
        found.append(f"pages: {pool.held} of {pool.usable} held, but nothing runs")
    if len(pool.index.page_of) != len(pool.index.hash_of):
        found.append(f"index: {len(pool.index.page_of)} hashes of {len(pool.index.hash_of)} pages")
    return found


def violations(replica: Replica) -> list[str]:
    """Everything: free + cached + held == all, refcounts == owners, slots and reserves as derived from the sequences."""
    pool, index = replica.pool, replica.pool.index
    found = sums(replica)
    owners = Counter(page for seq in replica.running for page in seq.pages)
    wrong = [page for page in range(pool.num_pages) if pool.refs[page] != owners.get(page, 0)]
    if wrong:
        found.append(f"refcounts differ from owners: pages {wrong[:8]}")
    states = Counter([*pool.free, *pool.cached, *owners])
    wrong = [page for page in range(pool.num_pages) if states.get(page, 0) != (page > 0)]
    if wrong or len(states) != pool.usable:
        found.append(f"not exactly one of free, cached, held: pages {wrong[:8]}")
    if any(index.page_of.get(page_hash) != page for page, page_hash in index.hash_of.items()):
        found.append("index: a page and its hash disagree")
    if any(page in index.hash_of for page in pool.free) or any(page not in index.hash_of for page in pool.cached):
        found.append("index: a free page is indexed, or a cached page is not")
    slots = Counter([*replica.slots, *(seq.slot for seq in replica.running)])
    if any(slots.get(slot, 0) != 1 for slot in range(1, replica.num_slots + 1)):
        found.append("a slot is not exactly one of free, taken")
    guaranteed = sum(seq.worst_pages - len(seq.pages) for seq in replica.running if seq.guaranteed)
    if guaranteed != replica.guaranteed_pages:
        found.append(f"guaranteed pages: {replica.guaranteed_pages}, should be {guaranteed}")
    if sum(seq.worst_pages for seq in replica.running) != replica.worst_pages:
        found.append(f"worst pages: {replica.worst_pages}")
    return found


def repair(replica: Replica) -> None:
    """Believe the sequences, derive the rest from them."""
    pool, index = replica.pool, replica.pool.index
    owners = Counter(page for seq in replica.running for page in seq.pages)
    pool.refs = [owners.get(page, 0) for page in range(pool.num_pages)]
    for page, page_hash in list(index.hash_of.items()):
        if index.page_of.get(page_hash) != page:
            del index.hash_of[page]
    index.page_of = {page_hash: page for page, page_hash in index.hash_of.items()}
    for page in [page for page in pool.cached if owners.get(page, 0) or page not in index.hash_of]:
        del pool.cached[page]
    for page in index.hash_of:
        if not owners.get(page, 0):
            pool.cached.setdefault(page)
    pool.free = [page for page in range(pool.num_pages - 1, 0, -1) if not owners.get(page, 0) and page not in pool.cached]
    taken = {seq.slot for seq in replica.running}
    replica.slots = [slot for slot in range(replica.num_slots, 0, -1) if slot not in taken]
    replica.guaranteed_pages = sum(seq.worst_pages - len(seq.pages) for seq in replica.running if seq.guaranteed)
    replica.worst_pages = sum(seq.worst_pages for seq in replica.running)
    replica.refused = None


def audit_and_repair(cell: Cell, replica: Replica, *, thorough: bool) -> list[str]:
    """A violation is counted, logged and repaired; it never ends the process."""
    found = violations(replica) if thorough else sums(replica)
    if found:
        cell.counters.audit_violations += len(found)
        log.error("audit", extra={"replica": replica.name, "violations": found})
        repair(replica)
    return found

"""Every state of a sequence meets every event: what it becomes at once, and how it ends. No cell of the table is undefined."""

from collections.abc import Callable

import pytest

from shared.messages import Drain, Fault, Finish
from tests.unit.scheduler.cells import SmallCell

PEER = "w/r/0/1"
PROMPT = list(range(1, 91))  # two chunks of at most 64 tokens
MAX_NEW = 6


def blocked() -> SmallCell:
    """One usable slot, which a younger sequence of a better class keeps for a while."""
    small = SmallCell(credits=1)
    small.join(num_slots=2)
    small.submit(9, [5], max_new=40, priority=-1)
    small.submit(1, PROMPT, MAX_NEW)
    return small


def prefilling() -> SmallCell:
    small = SmallCell(credits=1)
    small.join()
    small.submit(1, PROMPT, MAX_NEW)
    return small


def decoding() -> SmallCell:
    small = prefilling()
    for _ in range(4):
        small.answer()
    return small


def preempted() -> SmallCell:
    """Its slot went to a sequence of a better class."""
    small = SmallCell(credits=1)
    small.join(num_slots=2)
    small.submit(1, PROMPT, MAX_NEW)
    for _ in range(4):
        small.answer()
    small.submit(9, [5], max_new=40, priority=-1)
    small.answer()
    return small


def moving() -> SmallCell:
    small = decoding()
    small.gone(PEER)
    return small


def finished() -> SmallCell:
    small = prefilling()
    small.run()
    return small


STATES: dict[str, Callable[[], SmallCell]] = {
    "queued": blocked,
    "prefill": prefilling,
    "decode": decoding,
    "preempted": preempted,
    "moving": moving,
    "finished": finished,
}


def state(small: SmallCell) -> str:
    if 1 in small.ends:
        return "finished"
    seq = small.seq(1)
    if seq.replica is not None:
        return "prefill" if seq in seq.replica.prefilling else "decode"
    assert seq in small.cell.waiting
    return "preempted" if seq.preemptions else "moving" if seq.started else "queued"


def token(small: SmallCell) -> None:
    if small.plans.get(PEER):
        small.answer()


def fault(small: SmallCell) -> None:
    if PEER in small.plans:
        small.worker(PEER, Fault(0, "test"))
        small.plans.pop(PEER)


def duplicate(small: SmallCell) -> None:
    """The same Submit again: refused while its id is in use, afterwards a new sequence like any other."""
    out = small.core.on_gateway("g/a/1", small.submission(1, PROMPT, MAX_NEW), small.now)
    assert [type(message).__name__ for _, message in out] == ([] if 1 in small.ends else ["Reject"])
    if small.ends.pop(1, None) is not None:
        small.abort(1)


def hung(small: SmallCell) -> None:
    small.tick(11.0)
    if "r" not in small.cell.replicas:
        small.plans.pop(PEER, None)


def drain(small: SmallCell) -> None:
    if PEER in small.plans:
        small.worker(PEER, Drain("test"))


EVENTS: dict[str, Callable[[SmallCell], None]] = {
    "token": token,
    "abort": lambda small: small.abort(1),
    "death": lambda small: small.gone(PEER),
    "fault": fault,
    "duplicate": duplicate,
    "hung step": hung,
    "drain": drain,
}

# What it is right after the event, where it is not what it was.
AFTER = {
    ("queued", "death"): "queued",
    ("prefill", "token"): "decode",  # its last chunk is dispatched
    **{(before, "abort"): "finished" for before in STATES},
    **{(before, event): "moving" for before in ("prefill", "decode") for event in ("death", "fault", "hung step", "drain")},
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("before", STATES)
def test_state_meets_event(before: str, event: str) -> None:
    small = STATES[before]()
    assert state(small) == before
    output = list(small.output.get(1, []))
    EVENTS[event](small)
    assert state(small) == AFTER.get((before, event), before)
    assert small.output.get(1, [])[: len(output)] == output, "what was delivered stays"
    ends = dict(small.ends)
    if event != "duplicate" or before != "finished":
        small.join("s")
        small.run()
        if event == "abort" and before != "finished":
            assert ends[1] == small.ends[1] == Finish.ABORT and small.output.get(1, []) == output
        else:
            assert small.ends[1] == Finish.LENGTH and small.output[1] == [7] * MAX_NEW
    assert small.empty
    assert small.cell.counters.false_credit_tokens == small.cell.counters.audit_violations == 0

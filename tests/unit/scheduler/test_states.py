"""Every state of a sequence meets every event: what it becomes at once, and how it ends. No cell of the table is undefined."""

from collections.abc import Callable

import pytest

from shared.columns import i32
from shared.messages import Drain, Fault, Finish, StepDone
from tests.unit.scheduler.cells import SmallCell

PEER = "w/r/0/1"
PROMPT = list(range(1, 91))  # two chunks of at most 64 tokens
MAX_NEW = 6
DEADLINE_S = 1000.0


def blocked() -> SmallCell:
    """One usable slot, which a younger sequence of a better class keeps for a while."""
    small = SmallCell(credits=1)
    small.join(num_slots=2)
    small.submit(9, [5], max_new=40, priority=-1)
    small.submit(1, PROMPT, MAX_NEW, deadline_s=DEADLINE_S)
    return small


def prefilling() -> SmallCell:
    small = SmallCell(credits=1)
    small.join()
    small.submit(1, PROMPT, MAX_NEW, deadline_s=DEADLINE_S)
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
    small.submit(1, PROMPT, MAX_NEW, deadline_s=DEADLINE_S)
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


def aborted() -> SmallCell:
    """Finished, with a row of it still in flight."""
    small = decoding()
    small.abort(1)
    assert small.plans[PEER]
    return small


STATES: dict[str, Callable[[], SmallCell]] = {
    "queued": blocked,
    "prefill": prefilling,
    "decode": decoding,
    "preempted": preempted,
    "moving": moving,
    "finished": finished,
    "aborted": aborted,
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
    """A result comes; from a worker that is gone it comes too late."""
    if small.plans.get(PEER):
        small.answer()
    elif PEER not in small.plans:
        say(small, small.cell.last_step, 1)


def say(small: SmallCell, step: int, num_rows: int) -> None:
    small.worker(PEER, StepDone(step, i32([3] * num_rows), b"", 0, b"", b"", b"", 0, b"", b"", 0))


def duplicate_result(small: SmallCell) -> None:
    """The worker says the same result twice: it is not to be believed, and starts anew."""
    if small.plans.get(PEER):
        plan = small.answer()
        say(small, plan.step, plan.num_last + plan.num_decode)
        assert "r" not in small.cell.replicas
        small.plans.pop(PEER)
    else:
        say(small, small.cell.last_step, 1)


def fault(small: SmallCell) -> None:
    if PEER in small.plans:
        small.worker(PEER, Fault(0, "test"))
        small.plans.pop(PEER)


def duplicate(small: SmallCell) -> None:
    """The same Submit again: refused while its id is in use, afterwards a new sequence like any other."""
    again(small, priority=0)


def other_priority(small: SmallCell) -> None:
    """A live sequence keeps its class: the same Submit with another one is refused too."""
    known = small.cell.gateways["g/a/1"].sequences.get(1)
    again(small, priority=-3)
    assert known is None or (small.seq(1) is known and known.order[0] == 0)


def again(small: SmallCell, priority: int) -> None:
    out = small.core.on_gateway("g/a/1", small.submission(1, PROMPT, MAX_NEW, priority=priority), small.now)
    assert [type(message).__name__ for _, message in out] == ([] if 1 in small.ends else ["Reject"])
    if small.ends.pop(1, None) is not None:
        small.abort(1)


def other_class(small: SmallCell) -> None:
    """How a gateway changes the class: it goes on under a new id, from the tokens it has, and aborts the old one."""
    if 1 not in small.ends:
        output = small.output.get(1, [])
        small.submit(2, PROMPT, MAX_NEW, output=output, priority=-3, cached=0 if output else -1)
        small.abort(1)
        small.output[2] = [*output, *small.output.get(2, [])]


def deadline(small: SmallCell) -> None:
    small.cell.step_timeout_s = 2 * DEADLINE_S
    small.tick(DEADLINE_S + 1)


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
    "duplicate result": duplicate_result,
    "timeout": deadline,
    "hung step": hung,
    "drain": drain,
    "priority change": other_priority,
    "priority change by a new id": other_class,
}

# What it is right after the event, where it is not what it was.
AFTER = {
    ("prefill", "token"): "decode",  # its last chunk is dispatched
    **{(before, event): "finished" for before in STATES for event in ("abort", "timeout", "priority change by a new id")},
    **{
        (before, event): "moving"
        for before in ("prefill", "decode")
        for event in ("death", "fault", "hung step", "drain", "duplicate result")
    },
    **{("aborted", event): "finished" for event in EVENTS},
}
NEW = ("duplicate", "priority change")  # of a finished one: its id is free, so it is a new sequence (which again() aborts)
# How it ends after the event, where that is not with all its tokens.
ENDS: dict[tuple[str, str], int | str] = {
    **{(before, event): Finish.ABORT for before in STATES for event in ("abort", "priority change by a new id")},
    **{(before, "timeout"): Finish.DEADLINE for before in STATES},
    ("queued", "timeout"): "deadline_exceeded",  # refused: it never ran
    **{("finished", event): Finish.LENGTH for event in EVENTS},
    **{("aborted", event): Finish.ABORT for event in EVENTS},
    **{("finished", event): Finish.ABORT for event in NEW},
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("before", STATES)
def test_state_meets_event(before: str, event: str) -> None:
    small = STATES[before]()
    assert state(small) == ("finished" if before == "aborted" else before)
    output = list(small.output.get(1, []))
    EVENTS[event](small)
    assert state(small) == ("finished" if event in NEW and 1 in small.ends else AFTER.get((before, event), before))
    assert small.output.get(1, [])[: len(output)] == output, "what was delivered stays"
    small.join("s")
    small.run()
    end = ENDS.get((before, event), Finish.LENGTH)
    assert small.ends[1] == end
    assert small.output.get(1, []) == ([7] * MAX_NEW if end == Finish.LENGTH else output)
    if (before, event) in [(each, "priority change by a new id") for each in STATES if each not in ("finished", "aborted")]:
        assert small.ends[2] == Finish.LENGTH and small.output[2] == [7] * MAX_NEW
    assert small.empty
    counters = small.cell.counters
    assert counters.false_credit_tokens == counters.audit_violations == counters.internal_errors == 0
    assert counters.generated_tokens == sum(map(len, small.output.values())) - len(output) * (2 in small.output)
    assert not small.cell.accounts.of(0, "", 1).live

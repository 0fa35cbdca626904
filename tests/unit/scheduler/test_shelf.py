"""Resumable streams in the scheduler: taken over from the living and the dead, kept for a grace time, bounded."""

import pytest

from scheduler import shelf
from shared.columns import read_i32
from shared.messages import PROTOCOL, STOPPED, Abort, Finish, GatewayHello, Kept, Resume
from tests.unit.scheduler.cells import GATEWAY, SmallCell

OTHER = "g/b/1"
PROMPT = [1, 2, 3, 4, 5]


def two_gateways() -> SmallCell:
    small = SmallCell()
    small.join()
    small.gateway(GatewayHello(PROTOCOL, "b", "m"), peer=OTHER)  # no tick yet: the grace time must count from now all the same
    return small


def begin(small: SmallCell, number: int = 1, choice: int = 0, stream: str = "s", num_tokens: int = 3) -> None:
    """A choice of a stream of gateway a, that has so many tokens."""
    small.submit(number, PROMPT, 20, stream=stream, choice=choice, ticket=b"ticket", tenant="acme")
    small.run_until(lambda: len(small.output.get(number, ())) == num_tokens)


def ask(small: SmallCell, stream: str = "s", tenant: str = "acme", peer: str = OTHER) -> list[Kept]:
    small.sent.clear()
    small.gateway(Resume(9, stream, tenant), peer=peer)
    found = [message for to, message in small.sent if isinstance(message, Kept) and to == peer]
    assert found and all(kept.ask == 9 for kept in found)
    return found if found[0].total else []


def test_a_stream_is_taken_over_from_a_living_gateway() -> None:
    small = two_gateways()
    begin(small)
    small.tick(2.0)
    (kept,) = ask(small)
    assert (kept.total, kept.choice, kept.ticket, kept.num_prompt, kept.reason) == (1, 0, b"ticket", 5, 0)
    assert read_i32(kept.tokens).tolist() == [*PROMPT, 7, 7, 7]
    assert kept.cached == 0 and kept.age_s == pytest.approx(2.0)
    assert small.ends[1] == Finish.ABORT, "whoever had it is told"
    assert len(small.cell.shelf) == 1


def entrusted(small: SmallCell) -> list[tuple[str, Kept]]:
    """What gateways were told to keep or to forget within the next tick."""
    small.sent.clear()
    small.tick(0.1)
    return [(peer, message) for peer, message in small.sent if isinstance(message, Kept)]


def test_a_stream_is_entrusted_to_a_second_gateway_until_it_is_forgotten() -> None:
    small = SmallCell()
    small.join()
    begin(small, 1, 0)
    begin(small, 2, 1)
    assert entrusted(small) == [], "there is no other"
    small.gateway(GatewayHello(PROTOCOL, "b", "m"), peer=OTHER)
    (to, first), (_, second) = entrusted(small)
    assert to == OTHER and (first.ask, first.total, first.stream) == (0, 1, "s") and (first.choice, second.choice) == (0, 1)
    assert first.tenant == "acme" and first.ticket == b"ticket" and first.num_prompt == len(PROMPT)
    assert first.age_s == pytest.approx(0.2) and not entrusted(small)
    small.run()
    assert not entrusted(small), "its client may still come"
    small.sent.clear()
    small.tick(61.0)
    assert [(peer, kept.total) for peer, kept in small.sent if isinstance(kept, Kept)] == [(OTHER, 0)]


def test_who_takes_over_what_was_entrusted_to_him_is_no_second_gateway() -> None:
    small = two_gateways()
    begin(small)
    assert [peer for peer, _ in entrusted(small)] == [OTHER]
    (kept,) = ask(small)
    fields = {"stream": "s", "ticket": b"ticket", "tenant": "acme", "turn": kept.turn}
    small.gateway(small.submission(5, PROMPT, 60, output=[7, 7, 7], **fields), peer=OTHER)
    assert [(peer, kept.total) for peer, kept in entrusted(small)] == [(OTHER, 0), (GATEWAY, 1)]
    small.core.on_gone(GATEWAY, "test", small.now)
    assert not entrusted(small)
    small.gateway(GatewayHello(PROTOCOL, "c", "m"), peer="g/c/1")
    assert [(peer, kept.total) for peer, kept in entrusted(small)] == [("g/c/1", 1)]


def test_what_was_entrusted_is_told_to_the_next_scheduler() -> None:
    small = two_gateways()
    begin(small)
    ((_, kept),) = entrusted(small)
    after = two_gateways()
    after.gateway(kept, peer=OTHER)
    (found,) = ask(after)
    assert (found.total, found.choice, found.ticket, found.num_prompt) == (1, 0, b"ticket", 5)
    assert not ask(after, tenant="other")
    after.tick(61.0)
    assert [(peer, kept.total) for peer, kept in after.sent if isinstance(kept, Kept) and not kept.ask] == [(OTHER, 0)]


def test_the_taken_stream_goes_on_and_is_billed_once() -> None:
    small = two_gateways()
    begin(small)
    (kept,) = ask(small)
    fields = {"stream": "s", "choice": 0, "ticket": b"ticket", "tenant": "acme", "cached": kept.cached, "turn": kept.turn}
    small.gateway(small.submission(5, PROMPT, 6, output=[7, 7, 7], **fields), peer=OTHER)
    assert len(small.cell.shelf) == 0
    small.run()
    assert small.output[5] == [7, 7, 7] and small.ends[5] == Finish.LENGTH
    assert small.cell.counters.prompt_tokens == len(PROMPT)
    (again,) = ask(small, peer=GATEWAY)
    assert again.reason == Finish.LENGTH and len(again.tokens) == 4 * 11, "the end may have been lost on its way"


def test_a_stream_of_a_dead_gateway_waits() -> None:
    small = two_gateways()
    begin(small)
    small.gone(GATEWAY)
    assert not small.replica().running, "nothing is computed for nobody"
    (kept,) = ask(small)
    assert len(kept.tokens) == 4 * 8


def test_a_stream_whose_client_left_waits_for_the_grace_time_only() -> None:
    small = two_gateways()
    begin(small)
    small.abort(1)
    small.tick(59.0)
    assert ask(small)
    small.tick(2.0)
    assert not ask(small)
    assert len(small.cell.shelf) == 0 and small.cell.shelf.num_bytes == 0 and small.empty


def test_another_tenant_cannot_take_it() -> None:
    small = two_gateways()
    begin(small)
    assert not ask(small, tenant="evil") and not ask(small, tenant="") and not ask(small, stream="t")
    assert 1 not in small.ends
    small.abort(1)
    assert not ask(small, tenant="evil")
    assert ask(small)


def test_a_choice_that_ended_long_ago_is_kept_as_long_as_its_siblings_run() -> None:
    small = two_gateways()
    begin(small, 1, 0)
    small.gateway(Abort((1).to_bytes(8, "little"), STOPPED))
    begin(small, 2, 1)
    small.tick(100.0)
    found = {kept.choice: kept for kept in ask(small)}
    assert {choice: (kept.total, kept.reason) for choice, kept in found.items()} == {0: (2, Finish.STOP), 1: (2, 0)}


def test_submitted_again_by_its_own_gateway_it_is_live_once() -> None:
    """A gap: the new id comes before the abort of the old one."""
    small = two_gateways()
    begin(small)
    small.gateway(small.submission(2, PROMPT, 20, output=[7, 7], stream="s", tenant="acme", cached=0))
    assert small.ends[1] == Finish.ABORT and 2 not in small.ends
    small.abort(1)
    assert len(small.cell.shelf) == 0
    (kept,) = ask(small)
    assert len(kept.tokens) == 4 * 7 and small.ends[2] == Finish.ABORT


def test_a_gateway_that_has_lost_a_stream_cannot_take_it_back() -> None:
    """It was telling its client what was known, or was cut off, while another came: its submit arrives too late."""
    small = two_gateways()
    begin(small)
    (first,) = ask(small)
    (second,) = ask(small, peer=GATEWAY)
    assert (first.turn, second.turn) == (1, 2)
    fields = {"stream": "s", "ticket": b"ticket", "tenant": "acme", "cached": 0}
    small.gateway(small.submission(5, PROMPT, 20, output=[7, 7, 7], turn=2, **fields))
    small.gateway(small.submission(6, PROMPT, 20, output=[7, 7, 7], turn=1, **fields), peer=OTHER)
    assert small.ends[6] == Finish.ABORT and 5 not in small.ends
    small.run()
    assert small.ends[5] == Finish.LENGTH


def test_a_refused_stream_leaves_nothing() -> None:
    small = SmallCell()  # without a worker
    small.submit(1, PROMPT, 20, stream="s", deadline_s=0.5)
    small.tick(1.0)
    assert small.ends[1] == "deadline_exceeded"
    assert not small.cell.shelf.holds("s")


def test_what_gateways_kept_through_a_restart_is_known_again() -> None:
    small = two_gateways()
    tokens = bytes(4 * 8)
    small.gateway(Kept(0, 0, "s", 0, 0, "acme", b"t", tokens, 5, 0, 0, 30.0))
    small.gateway(Kept(0, 0, "s", 0, 0, "acme", b"t", tokens[:-4], 5, 0, 0, 30.0), peer=OTHER)
    small.tick(0.0)
    (kept,) = ask(small)
    assert len(kept.tokens) == 4 * 8 and kept.age_s == pytest.approx(30.0)
    begin(small, stream="live")
    small.gateway(Kept(0, 0, "live", 0, 0, "acme", b"t", tokens, 5, 0, 0, 30.0))
    (kept,) = ask(small, stream="live")
    assert read_i32(kept.tokens).tolist()[:5] == PROMPT, "a live sequence knows better"
    small.tick(61.0)
    assert len(small.cell.shelf) == 0 and small.cell.shelf.num_bytes == 0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "MAX_BYTES", 3 * (shelf.ENTRY_BYTES + 4 * 8 + 6))
    small = two_gateways()
    for number in range(1, 6):
        begin(small, number, stream=f"s{number}")
        small.abort(number)
    assert [bool(ask(small, stream=f"s{number}")) for number in range(1, 6)] == [False, False, True, True, True]
    assert small.cell.shelf.num_bytes <= shelf.MAX_BYTES


def test_an_ordinary_sequence_is_not_kept() -> None:
    small = two_gateways()
    small.submit(1, PROMPT, 4)
    small.run()
    assert len(small.cell.shelf) == 0 and not ask(small, stream="", tenant="")

"""Which Submits are refused and how, and how sequences end (B35, S62)."""

import math
from typing import Any

import pytest

from scheduler.core import Core
from shared.columns import i32, i64
from shared.messages import PROTOCOL, STOPPED, Abort, Finish, GatewayHello, Reset, Status
from tests.unit.scheduler.cells import GATEWAY, SmallCell

MALFORMED: dict[str, dict[str, Any]] = {
    "negative token": {"tokens": i32([1, -2, 3])},
    "no tokens": {"tokens": b"", "num_prompt": 0},
    "num_prompt beyond tokens": {"num_prompt": 4},
    "num_prompt of zero": {"num_prompt": 0},
    "id of zero": {"id": 0},
    "id beyond int64": {"id": 2**64 - 1},
    "negative max_new": {"max_new": -1},
    "huge max_new": {"max_new": 2**63 - 1},
    "max_new below the output so far": {"tokens": i32([1, 2, 3, 4, 5]), "max_new": 1},
    "negative min_new": {"min_new": -1},
    "too many hashes": {"page_hashes": bytes(16)},
    "short root hash": {"root_hash": b""},
    "two samplings": {"sampling": bytes(112)},
    "sampling of another prompt": {"sampling": bytes(56)},
    "age is not a number": {"age_s": math.nan},
    "negative deadline": {"deadline_s": -1.0},
    "endless deadline": {"deadline_s": math.inf},
}


@pytest.mark.parametrize("fields", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("with_worker", [True, False])
def test_malformed_submit_is_refused(fields: dict[str, Any], with_worker: bool) -> None:
    small = SmallCell()
    if with_worker:
        small.join()
    submit = small.submission(3, [1, 2, 3])._replace(**fields)
    small.gateway(submit)
    reject = small.rejects[submit.id]
    assert (reject.status, reject.code) == (400, "invalid_request") and reject.text
    assert small.empty


def test_id_in_use_is_refused_and_the_first_lives_on() -> None:
    small = SmallCell()
    small.join()
    small.submit(1, [1, 2], max_new=5)
    out = small.core.on_gateway(GATEWAY, small.submission(1, [3]), small.now)
    assert [message[1] for _, message in out] == [400]
    small.run()
    assert small.output[1] == [7] * 5


def test_prompt_longer_than_the_pool_does_not_block_the_next() -> None:
    """B35: 8 pages of 16 tokens, a prompt of 200 tokens, then one of 5."""
    small = SmallCell(page_tokens=16)
    small.join(num_pages=9, max_model_len=4096)
    small.submit(1, list(range(200)))
    small.submit(2, list(range(5)))
    small.run()
    reject = small.rejects[1]
    assert (reject.status, reject.code) == (400, "context_length_exceeded")
    assert "13 pages" in reject.text and "8 pages" in reject.text
    assert small.ends[2] == Finish.LENGTH and small.output[2] == [7] * 4 and small.empty


def test_prompt_longer_than_the_model_names_both_numbers() -> None:
    small = SmallCell()
    small.join(max_model_len=50)
    small.submit(1, [1] * 50)
    assert "50 tokens" in small.rejects[1].text and "51" in small.rejects[1].text
    small.submit(2, [1] * 50, max_new=0, score_width=0)  # no output: it fits exactly
    small.submit(3, [1] * 49, max_new=9)
    small.run()
    assert small.ends[2] == Finish.LENGTH and small.scores[2] == 49
    assert small.output[3] == [7]  # ends with length at the model's limit


@pytest.mark.parametrize(("pages", "model_len", "expected"), [(5, 128, 16), (65, 20, 20)])
def test_output_ends_with_length_at_the_pool_or_model_limit(pages: int, model_len: int, expected: int) -> None:
    small = SmallCell()
    small.join(num_pages=pages, max_model_len=model_len)
    small.submit(1, [1] * 6, max_new=1000)
    small.run()
    assert small.ends[1] == Finish.LENGTH and 6 + len(small.output[1]) == expected and small.empty


def test_what_never_fits_is_refused_when_the_first_worker_comes() -> None:
    small = SmallCell()
    small.submit(1, [1] * 300)
    small.submit(2, [1] * 3)
    assert not small.ends
    small.join()
    small.run()
    assert small.ends == {1: "context_length_exceeded", 2: Finish.LENGTH}


def test_full_queue_is_a_429_with_retry_after() -> None:
    small = SmallCell(max_queued=2)
    for number in (1, 2, 3):
        small.submit(number, [1])
    assert small.rejects[3].status == 429 and small.rejects[3].retry_after_s > 0
    small.submit(4, [1], output=[7])  # a stream that ran before a restart is never turned away
    assert 4 not in small.ends


def test_queued_tokens_are_limited_but_an_empty_queue_takes_any() -> None:
    small = SmallCell()
    small.cell.max_queued_tokens = 10
    small.submit(1, [1] * 30)
    small.submit(2, [1])
    assert small.rejects[2].status == 429 and "31 tokens" in small.rejects[2].text and "10" in small.rejects[2].text
    small.join()
    small.run()
    small.submit(3, [1] * 30)
    assert 3 not in small.rejects and small.cell.waiting.num_tokens == 0


def test_predicted_wait_is_limited_once_waiting_was_seen() -> None:
    small = SmallCell(credits=1)
    small.cell.max_wait_s = 3.0
    small.join(num_slots=2)
    for number in range(1, 12):  # one runs, ten wait: nothing is known about how long
        small.submit(number, [number], max_new=1)
    assert not small.rejects
    for _ in range(4):  # one start per second
        small.now += 1.0
        small.answer()
    small.submit(20, [1])
    assert small.rejects[20].status == 429 and "predicted wait" in small.rejects[20].text
    assert small.rejects[20].retry_after_s > 0
    small.run()
    small.now += 600.0
    small.submit(21, [1])  # an empty queue, however slow it was
    small.submit(22, [1])
    assert 21 not in small.rejects


def test_what_a_gateway_tells_again_was_admitted_before_however_long_the_telling_takes() -> None:
    small = SmallCell(max_queued=1)
    small.submit(1, [1])
    small.now += 30.0
    small.submit(2, [1], age_s=33.0, again=True)
    assert not small.rejects
    small.submit(3, [1], age_s=33.0)
    assert small.rejects[3].status == 429


def test_deadline_while_queued_and_while_running() -> None:
    small = SmallCell()
    small.submit(1, [1], deadline_s=2.0)
    small.submit(2, [1], output=[5], deadline_s=2.0)
    small.tick(2.5)
    assert small.rejects[1].status == 504 and small.ends[2] == Finish.DEADLINE
    small.join()
    small.submit(3, [1], max_new=50, deadline_s=2.0)
    small.answer()
    small.tick(2.5)
    assert small.ends[3] == Finish.DEADLINE and small.output[3] == [7]
    small.run()
    assert small.empty


def test_resumed_at_its_end_ends_at_once() -> None:
    small = SmallCell()
    small.join()
    small.submit(1, [1], max_new=2, output=[7, 7])
    small.submit(2, [1], max_new=9, output=[7, 3], stop_ids=i32([3]))
    small.submit(3, [1] * 20, max_new=999, output=[2] * 200)
    assert small.ends == {1: Finish.LENGTH, 2: Finish.STOP, 3: Finish.LENGTH} and small.empty


def test_stop_ids_end_a_sequence_from_min_new_on() -> None:
    small = SmallCell()
    small.join()
    small.submit(1, [1], max_new=9, stop_ids=i32([7]))
    small.submit(2, [1], max_new=9, stop_ids=i32([7]), min_new=3)
    small.run()
    assert small.output == {1: [7], 2: [7] * 4} and small.ends == {1: Finish.STOP, 2: Finish.STOP}


def test_an_answer_that_ended_at_a_stop_string_is_booked_as_stopped() -> None:
    small = SmallCell()
    small.join()
    small.submit(1, [1], max_new=9)
    small.submit(2, [1], max_new=9)
    small.gateway(Abort(i64([1]), STOPPED))
    small.abort(2)
    finished = small.cell.counters.finished
    assert (finished["stop"], finished["abort"], small.cell.counters.aborts) == (1, 1, 1)


def test_row_without_an_allowed_token_ends_with_error() -> None:
    small = SmallCell()
    small.join()
    small.submit(1, [1])
    small.answer(token=-1)
    assert small.ends[1] == Finish.ERROR and 1 not in small.output
    small.run()
    assert small.empty


STATES = (
    "queued",
    "queued without worker",
    "in prefill",
    "prefill in flight",
    "decoding",
    "parked",
    "preempted",
    "moved",
    "ended",
)


@pytest.mark.parametrize("event", ["abort", "gateway gone", "deadline", "hello again", "worker gone", "unknown id"])
@pytest.mark.parametrize("state", STATES)
def test_every_event_is_legal_in_every_state(state: str, event: str) -> None:
    """S62."""
    small = SmallCell(credits=1)
    peer = "w/r/0/1"
    if state != "queued without worker":
        small.join(num_slots=2 if state == "queued" else 9, num_pages=40)
    if state == "queued":
        small.submit(2, [9], max_new=30)
    length = 100 if state == "in prefill" else 3
    small.submit(1, [1] * length, max_new=2 if state == "parked" else 1 if state == "ended" else 20, deadline_s=5.0)
    if state in ("in prefill", "decoding", "parked", "preempted", "moved", "ended"):
        small.answer()
    if state == "preempted":
        small.cell.preempt(small.seq(1))
    if state == "moved":
        small.cell.requeue(small.seq(1))
    assert (1 in small.ends) == (state == "ended")
    match event:
        case "abort":
            small.abort(1)
        case "gateway gone":
            small.gone(GATEWAY)
        case "deadline":
            small.tick(6.0)
        case "hello again":
            small.gateway(GatewayHello(PROTOCOL, "a", "m"))
        case "worker gone":
            small.gone(peer)
            small.join()
        case "unknown id":
            small.abort(77, 0, -1)
    small.run()
    if event in ("worker gone", "unknown id"):
        if state == "queued without worker":
            small.join()
            small.run()
        assert small.ends[1] == Finish.LENGTH
    elif event in ("abort", "deadline") and state != "ended":
        expected = {"abort": Finish.ABORT, "deadline": Finish.DEADLINE}[event]
        queued = state in ("queued", "queued without worker")
        assert small.ends[1] == ("deadline_exceeded" if event == "deadline" and queued else expected)
    if state == "queued" and event in ("abort", "deadline"):
        assert small.ends[2] == Finish.LENGTH
    assert small.empty


def test_gateway_of_another_protocol_is_refused() -> None:
    small = SmallCell()
    reset = small.core.on_gateway("g/b/1", GatewayHello(PROTOCOL + 1, "b", "m"), 1.0)[0][1]
    assert isinstance(reset, Reset) and reset.fatal
    assert f"protocol {PROTOCOL + 1}" in reset.reason and f"scheduler {PROTOCOL}" in reset.reason


def test_stranger_is_told_to_say_hello() -> None:
    small = SmallCell()
    assert small.core.on_gateway("g/x/9", Abort(b"", ""), 1.0) == [("g/x/9", Reset("say hello first", False))]


def test_new_incarnation_of_a_gateway_ends_the_old_streams() -> None:
    small = SmallCell()
    small.join()
    small.submit(1, [1, 2], max_new=50)
    small.answer()
    small.gateway(GatewayHello(PROTOCOL, "a", "m"), peer="g/a/2")
    small.gateway(small.submission(1, [1, 2], 50, output=[7]), peer="g/a/2")
    assert small.ends[1] == Finish.ABORT  # told to the old incarnation
    assert list(small.cell.gateways["g/a/2"].sequences) == [1]


def test_status_on_change_and_each_second() -> None:
    small = SmallCell()

    def states() -> list[str]:
        found = [message.state for _, message in small.sent if isinstance(message, Status)]
        small.sent.clear()
        return found

    assert states() == ["loading"]
    small.tick(0.1)
    small.tick(0.1)
    assert states() == ["loading"]
    small.join()
    small.tick(0.1)
    assert states() == ["ready"]
    small.tick(0.5)
    assert states() == []
    small.tick(0.6)
    assert states() == ["ready"]
    small.gone("w/r/0/1")
    small.tick(0.1)
    assert states() == ["loading"]


def test_predicted_wait_follows_the_start_rate() -> None:
    small = SmallCell(credits=1)
    small.join(num_slots=2)
    for number in range(1, 30):
        small.now += 1.0
        small.submit(number, [number], max_new=1)
        small.answer()
    for number in range(30, 50):
        small.submit(number, [number], max_new=90)
    status = small.core.status(small.now)
    assert status.num_queued == 19 and 5 < status.wait_s < 120


def test_leaving_scheduler_sends_everybody_away() -> None:
    small = SmallCell()
    small.join()
    core: Core = small.core
    out = core.leave("bye", small.now)
    kinds = [(peer, type(message).__name__) for peer, message in out]
    assert kinds == [(GATEWAY, "Status"), (GATEWAY, "Reset"), ("w/r/0/1", "Reset")]
    assert out[0][1][0] == "draining"


def test_ended_sequences_do_not_wait_for_their_deadline() -> None:
    small = SmallCell()
    small.join()
    for number in range(1, 200):
        small.submit(number, [1, 2, 3], 2, deadline_s=3600.0)
        small.run()
    small.submit(300, [1, 2, 3], 2, deadline_s=50.0)
    small.tick(1.0)
    assert [each[2].id for each in small.core._deadlines] == [300]
    small.tick(50.0)
    assert small.ends[300] == Finish.DEADLINE and not small.core._deadlines

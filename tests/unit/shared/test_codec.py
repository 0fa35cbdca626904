"""Messages to bytes and back: everything round-trips, and nothing that is not exactly a message gets in."""

from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import codec, messages
from shared.codec import BadFrame, Codec, encode

KINDS = sorted(codec.TAGS, key=lambda kind: kind.__name__)
LINKS = {
    "gateway to scheduler": (messages.GATEWAY_TO_SCHEDULER, messages.FromGateway),
    "scheduler to gateway": (messages.SCHEDULER_TO_GATEWAY, messages.ToGateway),
    "worker to scheduler": (messages.WORKER_TO_SCHEDULER, messages.FromWorker),
    "scheduler to worker": (messages.SCHEDULER_TO_WORKER, messages.ToWorker),
}
EVERYTHING = Codec(tuple(KINDS))
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(1 - 2**62, 2**62 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bool: st.booleans(),
    bytes: st.binary(max_size=40),
}


def field_types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def column_items(hint: Any) -> int:
    """Bytes per item of a column, 0 for another field."""
    return get_args(hint)[1] if get_origin(hint) is Annotated else 0


def some(hint: Any) -> st.SearchStrategy[Any]:
    item = column_items(hint)
    if not item:
        return PLAIN[hint]
    return st.integers(0, 5).flatmap(lambda count: st.binary(min_size=count * item, max_size=count * item))


def some_message(kind: Any) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{name: some(hint) for name, hint in field_types(kind).items()})


def example(kind: Any) -> Any:
    """One fixed message of a kind; every column holds two items."""
    fixed: dict[Any, Any] = {int: 7, float: 2.5, str: "text", bool: True, bytes: b"raw"}
    values = [b"\x01" * (2 * column_items(hint)) or fixed.get(hint) for hint in field_types(kind).values()]
    return kind(*values)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=25)
def test_round_trip(kind: Any, data: st.DataObject) -> None:
    message = data.draw(some_message(kind))
    decoded = EVERYTHING.decode(encode(message))
    assert type(decoded) is kind
    assert decoded == message


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_or_extended_copies_are_refused(kind: Any) -> None:
    frame = encode(example(kind))
    assert EVERYTHING.decode(frame) == example(kind)
    for length in range(len(frame)):
        with pytest.raises(BadFrame):
            EVERYTHING.decode(frame[:length])
    with pytest.raises(BadFrame):
        EVERYTHING.decode(frame + b"\x00")


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_arity_is_refused(kind: Any) -> None:
    fields = (codec.TAGS[kind], *example(kind))
    for wrong in (fields[:-1], (*fields, 0)):
        with pytest.raises(BadFrame):
            EVERYTHING.decode(msgpack.packb(wrong))


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_another_type_is_refused_by_name(kind: Any) -> None:
    for number, name in enumerate(field_types(kind)):
        wrong_values: list[Any] = [None, 1, 1.5, "x", True, b"", [1], {}]
        for wrong in wrong_values:
            fields: list[Any] = [codec.TAGS[kind], *example(kind)]
            if type(wrong) is type(fields[number + 1]):
                continue
            fields[number + 1] = wrong
            with pytest.raises(BadFrame, match=rf"\.{name} must be|not MessagePack"):
                EVERYTHING.decode(msgpack.packb(fields))


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_could_not_be_reckoned_with_is_refused_by_name(kind: Any) -> None:
    for name in (name for name, hint in field_types(kind).items() if hint is int):
        for sign in (-1, 1):
            largest = example(kind)._replace(**{name: sign * (2**62 - 1)})
            assert EVERYTHING.decode(encode(largest)) == largest
            with pytest.raises(BadFrame, match=rf"\.{name} is -?{2**62}, must be within {2**62} of 0"):
                EVERYTHING.decode(encode(largest._replace(**{name: sign * 2**62})))


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_of_a_broken_length_is_refused(kind: Any) -> None:
    for name, hint in field_types(kind).items():
        if column_items(hint) > 1:
            broken = example(kind)._replace(**{name: b"\x00" * (column_items(hint) + 1)})
            with pytest.raises(BadFrame, match=f"{name} has"):
                EVERYTHING.decode(encode(broken))


@pytest.mark.parametrize("link", LINKS)
def test_a_link_knows_its_own_messages_only(link: str) -> None:
    kinds, union = LINKS[link]
    assert set(kinds) == set(get_args(union))  # what may be sent and what must be handled are the same
    one_way = Codec(kinds)
    for kind in KINDS:
        if kind in kinds:
            assert one_way.decode(encode(example(kind))) == example(kind)
        else:
            with pytest.raises(BadFrame, match="is not a message of this link"):
                one_way.decode(encode(example(kind)))


def test_every_message_has_a_tag_and_tags_are_what_they_were() -> None:
    """Tags are the protocol: this list may only grow at its end, together with messages.PROTOCOL."""
    declared = {kind for kind in vars(messages).values() if isinstance(kind, type) and hasattr(kind, "_fields")}
    assert declared == set(codec.TAGS)
    assert {kind.__name__: tag for kind, tag in codec.TAGS.items()} == {
        "Reset": 1,
        "Drain": 2,
        "GatewayHello": 3,
        "Submit": 4,
        "Abort": 5,
        "GatewayWelcome": 6,
        "Status": 7,
        "Tokens": 8,
        "PromptScores": 9,
        "Reject": 10,
        "WorkerHello": 11,
        "StepDone": 12,
        "WorkerAlive": 13,
        "Fault": 14,
        "WorkerWelcome": 15,
        "StepPlan": 16,
        "Resume": 17,
        "Kept": 18,
        "DrainWorker": 19,
        "DrainAnswer": 20,
    }


def test_too_long_a_frame_is_refused_before_it_is_read() -> None:
    small = Codec((messages.Reset,), max_frame_bytes=100)
    assert small.decode(encode(messages.Reset("x" * 90, False)))
    with pytest.raises(BadFrame, match="limit 100"):
        small.decode(encode(messages.Reset("x" * 100, False)))


@pytest.mark.parametrize(
    "value",
    [
        [],
        7,
        "text",
        None,
        {1: 2},
        [True],
        ["4"],
        [1.0],
        [99, "x"],
        [[1]],
        [1, {"a": 1}, True],
        [1, msgpack.ExtType(4, b"x"), True],
    ],
)
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(BadFrame):
        EVERYTHING.decode(msgpack.packb(value))


def test_a_length_that_lies_is_refused() -> None:
    for header in (b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"):
        with pytest.raises(BadFrame):
            EVERYTHING.decode(b"\x93\x01" + header)


@given(frame=st.binary(max_size=200))
@settings(max_examples=500)
def test_noise_never_raises_anything_else(frame: bytes) -> None:
    try:
        decoded = EVERYTHING.decode(frame)
    except BadFrame:
        return
    assert encode(decoded)


@given(data=st.data())
@settings(max_examples=300)
def test_a_damaged_message_never_raises_anything_else(data: st.DataObject) -> None:
    frame = bytearray(encode(example(data.draw(st.sampled_from(KINDS)))))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = EVERYTHING.decode(bytes(frame))
    except BadFrame:
        return
    assert type(decoded) in codec.TAGS


def test_what_is_no_message_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="tuple is not a message"):
        encode((1, 2))

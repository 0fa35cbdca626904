"""Messages to bytes and back. Only the message types of one link are known to its codec; everything is checked on the way in.

A frame is the MessagePack array [tag, *fields]. A frame that is too long, names an unknown tag, has another number of
fields, a field of another type, a number beyond 62 bits or a column of a broken length raises BadFrame. Nothing is ever
executed or unpickled.
"""

from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgpack

from shared import messages

MAX_FRAME_BYTES = 64 * 2**20
INT_LIMIT = 2**62  # of a number in either direction: what is reckoned from two of them can still be sent

# Tags are part of the protocol: never reuse one, append only.
TAGS: dict[type, int] = {
    kind: tag
    for tag, kind in enumerate(
        (
            messages.Reset,
            messages.Drain,
            messages.GatewayHello,
            messages.Submit,
            messages.Abort,
            messages.GatewayWelcome,
            messages.Status,
            messages.Tokens,
            messages.PromptScores,
            messages.Reject,
            messages.WorkerHello,
            messages.StepDone,
            messages.WorkerAlive,
            messages.Fault,
            messages.WorkerWelcome,
            messages.StepPlan,
            messages.Resume,
            messages.Kept,
            messages.DrainWorker,
            messages.DrainAnswer,
        ),
        start=1,
    )
}


class BadFrame(ValueError):
    """Bytes that are no message of this link."""


class _Shape(NamedTuple):
    kind: type
    types: tuple[type, ...]
    columns: tuple[tuple[int, int], ...]  # (field number, bytes per item) of every bytes column


def _shape(kind: type) -> _Shape:
    types: list[type] = []
    columns: list[tuple[int, int]] = []
    for number, hint in enumerate(get_type_hints(kind, include_extras=True).values()):
        if get_origin(hint) is Annotated:
            hint, item_bytes = get_args(hint)
            columns.append((number, item_bytes))
        types.append(hint)
    return _Shape(kind, tuple(types), tuple(columns))


def encode(message: tuple[Any, ...]) -> bytes:
    """Pack one message; TypeError when its type has no tag or a field cannot be packed."""
    tag = TAGS.get(type(message))
    if tag is None:
        raise TypeError(f"{type(message).__name__} is not a message")
    packed: bytes = msgpack.packb((tag, *message), use_bin_type=True)
    return packed


class Codec:
    """Decoder of one link: knows only the given message types."""

    def __init__(self, kinds: tuple[type, ...], max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._shapes = {TAGS[kind]: _shape(kind) for kind in kinds}
        self._max_frame_bytes = max_frame_bytes

    def decode(self, frame: bytes) -> Any:
        """Unpack one message; BadFrame when the frame is not exactly one well-formed message of this link."""
        if len(frame) > self._max_frame_bytes:
            raise BadFrame(f"frame of {len(frame)} bytes, limit {self._max_frame_bytes}")
        try:
            fields = msgpack.unpackb(frame, raw=False, use_list=False, max_map_len=0, max_ext_len=0, max_array_len=64)
        except Exception as error:  # msgpack raises many kinds; all mean the same here
            raise BadFrame(f"not MessagePack: {error}") from None
        if type(fields) is not tuple or not fields or type(fields[0]) is not int:
            raise BadFrame("not an array that starts with a tag")
        shape = self._shapes.get(fields[0])
        if shape is None:
            raise BadFrame(f"tag {fields[0]} is not a message of this link")
        values = fields[1:]
        if len(values) != len(shape.types):
            raise BadFrame(f"{shape.kind.__name__} has {len(shape.types)} fields, got {len(values)}")
        for number, (value, expected) in enumerate(zip(values, shape.types, strict=True)):
            if type(value) is not expected:
                name = shape.kind._fields[number]  # type: ignore[attr-defined]
                raise BadFrame(f"{shape.kind.__name__}.{name} must be {expected.__name__}, got {type(value).__name__}")
            if type(value) is int and not -INT_LIMIT < value < INT_LIMIT:
                name = shape.kind._fields[number]  # type: ignore[attr-defined]
                raise BadFrame(f"{shape.kind.__name__}.{name} is {value}, must be within {INT_LIMIT} of 0")
        for number, item_bytes in shape.columns:
            if len(values[number]) % item_bytes:
                name = shape.kind._fields[number]  # type: ignore[attr-defined]
                raise BadFrame(f"{shape.kind.__name__}.{name} has {len(values[number])} bytes, not a multiple of {item_bytes}")
        return shape.kind(*values)

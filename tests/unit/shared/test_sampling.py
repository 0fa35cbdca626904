"""The sampling records: struct and numpy see the same bytes, and the message columns have their sizes."""

import struct
from typing import Annotated, Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import messages, sampling
from shared.sampling import EDIT_FIELDS, OPEN_FIELDS, Edit, Sampling, choice_seed, pack_edits, unpack_edits

OPEN_DTYPE = np.dtype(OPEN_FIELDS)
EDIT_DTYPE = np.dtype(EDIT_FIELDS)
i32 = st.integers(-(2**31), 2**31 - 1)
f32 = st.floats(width=32, allow_nan=False)
some_sampling = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    **{name: f32 for name in Sampling._fields[1:7]},
    **{name: i32 for name in Sampling._fields[7:]},
)


def column_bytes(annotated: Any) -> int:
    item: int = get_args(annotated)[1]
    return item


def test_the_sizes_that_messages_declare() -> None:
    assert isinstance(messages.SAMPLING, type(Annotated[bytes, 1]))
    assert column_bytes(messages.SAMPLING) == sampling.SAMPLING_BYTES == len(Sampling().pack())
    assert column_bytes(messages.OPENS) == OPEN_DTYPE.itemsize
    assert column_bytes(messages.EDITS) == sampling.EDIT_BYTES == EDIT_DTYPE.itemsize


def test_seeds_of_a_column_of_opens_are_aligned() -> None:
    fields = OPEN_DTYPE.fields
    assert fields is not None
    assert fields["seed"][1] % 8 == 0
    assert OPEN_DTYPE.itemsize % 8 == 0


@given(st.lists(st.tuples(i32, i32, some_sampling), max_size=5))
def test_numpy_reads_what_struct_writes(opens: list[tuple[int, int, Sampling]]) -> None:
    column = b"".join(struct.pack("<ii", slot, computed) + each.pack() for slot, computed, each in opens)
    records = np.frombuffer(column, OPEN_DTYPE)
    assert len(records) == len(opens)
    for record, (slot, computed, each) in zip(records, opens, strict=True):
        assert (record["slot"], record["computed"]) == (slot, computed)
        for name in Sampling._fields:
            assert record[name] == getattr(each, name), name
        assert Sampling.unpack(each.pack()) == each


@given(st.lists(st.builds(Edit, token=i32, value=f32, until=i32), max_size=5))
def test_edits_round_trip_and_numpy_agrees(edits: list[Edit]) -> None:
    column = pack_edits(edits)
    assert unpack_edits(column) == edits
    assert [tuple(record) for record in np.frombuffer(column, EDIT_DTYPE).tolist()] == [tuple(edit) for edit in edits]


def test_a_forbidden_token_survives() -> None:
    assert unpack_edits(pack_edits([Edit(5, float("-inf"))])) == [Edit(5, float("-inf"), sampling.FOREVER)]


@pytest.mark.parametrize("record", [b"", b"x", Sampling().pack()[:-1], Sampling().pack() + b"\x00"])
def test_a_record_of_another_length_is_refused(record: bytes) -> None:
    with pytest.raises(struct.error):
        Sampling.unpack(record)


def test_the_defaults_change_nothing() -> None:
    plain = Sampling()
    assert (plain.temperature, plain.top_p, plain.min_p, plain.top_k) == (1.0, 1.0, 0.0, 0)
    assert (plain.presence_penalty, plain.frequency_penalty, plain.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (plain.logprobs, plain.score_width, plain.flags) == (-1, -1, 0)


@given(st.integers(0, 2**64 - 1))
def test_choices_have_seeds_of_their_own(seed: int) -> None:
    seeds = [choice_seed(seed, choice) for choice in range(128)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 128
    assert all(0 <= each < 2**64 for each in seeds)

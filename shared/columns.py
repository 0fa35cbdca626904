"""Columns of numbers as bytes: how per-row data cross the wire. All supported machines are little-endian, as the wire is."""

import sys
from array import array
from collections.abc import Iterable

assert sys.byteorder == "little", "the wire format is little-endian and columns are cast in place"


def i32(values: Iterable[int]) -> bytes:
    """Pack ints in [-2**31, 2**31) into an int32 column; OverflowError beyond."""
    return array("i", values).tobytes()


def i64(values: Iterable[int]) -> bytes:
    return array("q", values).tobytes()


def f32(values: Iterable[float]) -> bytes:
    return array("f", values).tobytes()


def read_i32(column: bytes) -> "memoryview[int]":
    """View an int32 column without copying; indexes, slices, iterates and has tolist()."""
    return memoryview(column).cast("i")


def read_i64(column: bytes) -> "memoryview[int]":
    return memoryview(column).cast("q")


def read_f32(column: bytes) -> "memoryview[float]":
    return memoryview(column).cast("f")

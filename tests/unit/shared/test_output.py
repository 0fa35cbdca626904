"""Output whose disk is full, whose reader is gone or reads nothing: whoever writes goes on, and is told later what was lost."""

import os
import time

import pytest

from shared import output
from shared.output import Output


def read_all(descriptor: int) -> str:
    found = b""
    while part := os.read(descriptor, 2**16):
        found += part
    return found.decode()


def test_what_is_written_arrives_in_order() -> None:
    reader, writer = os.pipe()
    made = Output(writer)
    for number in range(1000):
        made.write(f"{number}é\n")
    made.close()
    os.close(writer)
    assert read_all(reader).split() == [f"{number}é" for number in range(1000)]


def test_a_reader_that_reads_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "CLOSE_S", 0.1)
    reader, writer = os.pipe()
    made, line = Output(writer), "x" * 99 + "\n"
    started = time.monotonic()
    for _ in range(50_000):  # the pipe takes 64 KiB
        made.write(line)
    made.close()
    assert time.monotonic() - started < 10
    text = ""
    while text.count("\n") < output.MAX_WAITING:
        text += os.read(reader, 2**16).decode()
    made.write("last\n")
    while "last" not in text:
        text += os.read(reader, 2**16).decode()
    written = text.count(line)
    lost = [int(each.split()[0]) for each in text.splitlines() if "were lost" in each]
    assert written + sum(lost) == 50_000 and written >= output.MAX_WAITING


def test_a_full_disk_stops_nobody() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    made = Output(descriptor)
    for _ in range(100):
        made.write("x\n")
    made.close()
    reader, writer = os.pipe()
    os.dup2(writer, descriptor)  # there is room again
    os.close(writer)
    made.write("good\n")
    made.close()
    os.close(descriptor)
    assert read_all(reader) == "100 lines of the log were lost: it could not be written\ngood\n"


def test_a_reader_that_has_gone_stops_nobody() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    made = Output(writer)
    made.write("x\n")
    made.close()
    os.close(writer)

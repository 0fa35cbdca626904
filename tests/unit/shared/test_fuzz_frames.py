"""A short run of benchmarks/fuzz_frames.py, which takes a million frames."""

import random
from typing import Any

import pytest

from benchmarks import fuzz_frames
from shared import messages
from shared.codec import BadFrame, Codec

FRAMES = 5_000


@pytest.mark.parametrize("link", fuzz_frames.LINKS)
def test_decoder(link: str) -> None:
    assert 0 < fuzz_frames.fuzz_decoder(link, FRAMES, seed=3) < FRAMES / 2  # some mutations are messages too


async def test_sockets() -> None:
    assert (await fuzz_frames.fuzz_sockets(FRAMES, seed=3))["internal_errors"] == 0


async def test_strangers() -> None:
    assert await fuzz_frames.fuzz_strangers(FRAMES, seed=3) == 0


def test_a_decoder_that_lets_through_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def sloppy(self: Codec, frame: bytes) -> Any:
        raise BadFrame("x") if frame[:1] == b"\x93" else ValueError("sloppy")

    monkeypatch.setattr(Codec, "decode", sloppy)
    with pytest.raises(ValueError, match="sloppy"):
        fuzz_frames.fuzz_decoder("gateway to scheduler", FRAMES, seed=3)


def test_seeds_are_messages() -> None:
    for kinds in fuzz_frames.LINKS.values():
        for frame in fuzz_frames.seeds(kinds):
            Codec(kinds).decode(frame)
    pool = fuzz_frames.seeds(messages.GATEWAY_TO_SCHEDULER)
    assert len({fuzz_frames.mutate(random.Random(seed), pool) for seed in range(100)}) > 80

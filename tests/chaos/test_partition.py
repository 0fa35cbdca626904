"""The network between the scheduler and one of two workers is cut for a while (network namespaces: needs root and ip)."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from shared import keys
from tests.chaos.cell import running, until
from tests.chaos.requests import ask_all
from tests.chaos.test_moves import computing, long_bodies

PORT = 5712


class Cable(NamedTuple):
    """To a network namespace, which has the same name as our end."""

    name: str
    here: str  # our address
    there: str

    def cut(self, way: str, is_cut: bool) -> None:
        """Cut the cable, or one of its two directions, or mend it."""
        verb = "add" if is_cut else "del"
        match way:
            case "both":
                ip("-n", self.name, "link", "set", "eth0", "down" if is_cut else "up")
            case "to the worker":
                ip("route", verb, "blackhole", self.there)
            case "to the scheduler":
                ip("-n", self.name, "route", verb, "blackhole", self.here)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def cable() -> Iterator[Cable]:
    name, net = f"q{os.getpid()}", f"10.213.{os.getpid() % 250}"  # test processes run side by side
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and the command ip")
    try:
        ip("netns", "add", name)
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
    except subprocess.CalledProcessError as error:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"no network namespaces here: {error.stderr}")
    made = Cable(name, f"{net}.1", f"{net}.2")
    try:
        ip("addr", "add", f"{made.here}/30", "dev", name)
        ip("link", "set", name, "up")
        ip("-n", name, "addr", "add", f"{made.there}/30", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        yield made
    finally:
        subprocess.run(["ip", "route", "del", "blackhole", made.there], check=False, capture_output=True)
        ip("netns", "del", name)


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("way", "cut_s"), [("both", 0.4), ("both", 5.0), ("both", 60.0), ("to the worker", 5.0), ("to the scheduler", 5.0)]
)
async def test_no_token_is_lost_or_doubled(toy_folder: Path, tmp_path: Path, cable: Cable, way: str, cut_s: float) -> None:
    keys.make(tmp_path / "keys")
    prefixes: dict[str, tuple[str, ...]] = {"r0": ("ip", "netns", "exec", cable.name)}
    link = f"tcp://{cable.here}:{PORT}"
    curve = str(tmp_path / "keys")
    async with running(toy_folder, "--delay-s=0.02", workers=2, prefixes=prefixes, worker_link=link, curve_dir=curve) as cell:
        scheduler = cell.roles["scheduler"]
        await until(lambda: sum("replica ready" in line for _, line in scheduler.lines) == 2)
        asked = long_bodies(8, 150)
        expected = await ask_all(cell, asked)
        asking = asyncio.create_task(ask_all(cell, asked))
        await computing(cell, len(asked))
        cable.cut(way, True)
        await asyncio.sleep(cut_s)
        cable.cut(way, False)
        assert await asking == expected
        assert bool(scheduler.seen("replica dropped")) == (cut_s > cell.config.silence_s)
        await until(lambda: sum("replica ready" in line for _, line in scheduler.lines) >= 2 + (cut_s > 1), 30)
        assert await ask_all(cell, asked) == expected

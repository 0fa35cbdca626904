"""The network between the scheduler and one of two workers is cut for a while (network namespaces: needs root and ip)."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import keys
from tests.chaos.cell import running, until
from tests.chaos.requests import ask_all
from tests.chaos.test_moves import computing, long_bodies

HERE, THERE = "10.213.77.1", "10.213.77.2"
PORT = 5712


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def namespace() -> Iterator[str]:
    """A network namespace at the other end of a cable; "q<pid>" is its name and that of our end."""
    name = f"q{os.getpid()}"
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and the command ip")
    try:
        ip("netns", "add", name)
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
    except subprocess.CalledProcessError as error:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"no network namespaces here: {error.stderr}")
    try:
        ip("addr", "add", f"{HERE}/30", "dev", name)
        ip("link", "set", name, "up")
        ip("-n", name, "addr", "add", f"{THERE}/30", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        yield name
    finally:
        ip("netns", "del", name)


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("cut_s", [0.4, 5.0, 60.0])
async def test_no_token_is_lost_or_doubled(toy_folder: Path, tmp_path: Path, namespace: str, cut_s: float) -> None:
    keys.make(tmp_path / "keys")
    prefixes: dict[str, tuple[str, ...]] = {"r0": ("ip", "netns", "exec", namespace)}
    link = f"tcp://{HERE}:{PORT}"
    curve = str(tmp_path / "keys")
    async with running(toy_folder, "--delay-s=0.02", workers=2, prefixes=prefixes, worker_link=link, curve_dir=curve) as cell:
        scheduler = cell.roles["scheduler"]
        await until(lambda: sum("replica ready" in line for _, line in scheduler.lines) == 2)
        asked = long_bodies(8, 150)
        expected = await ask_all(cell, asked)
        asking = asyncio.create_task(ask_all(cell, asked))
        await computing(cell, len(asked))
        ip("-n", namespace, "link", "set", "eth0", "down")
        await asyncio.sleep(cut_s)
        ip("-n", namespace, "link", "set", "eth0", "up")
        assert await asking == expected
        assert bool(scheduler.seen("replica dropped")) == (cut_s > cell.config.silence_s)
        await until(lambda: sum("replica ready" in line for _, line in scheduler.lines) >= 2 + (cut_s > 1), 30)
        assert await ask_all(cell, asked) == expected

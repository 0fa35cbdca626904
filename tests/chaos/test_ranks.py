"""Tensor-parallel ranks behind the real command, killed or frozen at many tokens: the answers stay as they were."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from tests.chaos.test_real_model import SILENCE_S, check, kill
from tests.e2e.serving import Served, ended, until

TP = 3  # SmolLM2 has 9 heads and 3 KV heads


def ranks(server: Served) -> list[int]:
    """Process ids of all ranks, by rank; empty while there is no whole group."""
    launcher = server.children().get("gpu_worker", 0)
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                words = (folder / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if int(status[1]) == launcher and status[0] != "Z" and "gpu_worker.parallel.rank" in words:
                found[int(words[words.index("gpu_worker.parallel.rank") + 1])] = int(folder.name)
    return [pid for _, pid in sorted(found.items())] if len(found) == TP else []


def kill_rank(server: Served, rank: str) -> None:
    os.kill(ranks(server)[int(rank)], signal.SIGKILL)


def freeze_rank(server: Served, rank: str) -> None:
    """It never wakes: the others give it up, and the group is started again."""
    frozen = ranks(server)
    os.kill(frozen[int(rank)], signal.SIGSTOP)
    until(lambda: ranks(server) and not set(ranks(server)) & set(frozen), 60)


def pause_rank(server: Served, rank: str) -> None:
    """Shorter than the others' patience, so that all of them go on."""
    pid = ranks(server)[int(rank)]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(SILENCE_S / 3)
    os.kill(pid, signal.SIGCONT)


def serve() -> Served:
    return Served(f"--tensor-parallel-size={TP}", "--device=cpu", f"--silence-s={SILENCE_S}", "--dtype=float32")


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("harm", [kill_rank, freeze_rank, pause_rank])
async def test_a_rank_at_many_positions(smollm2_folder: Path, rank: str, harm: object) -> None:
    server = await asyncio.to_thread(serve)
    with ended(server):
        await check(server, "gpu_worker", lambda each, _: harm(each, rank), (0, 1, 9, 30))  # type: ignore[operator]


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(1200)
async def test_the_scheduler_at_many_positions(smollm2_folder: Path) -> None:
    """No rank is started again: all keep their weights and pages, whatever plans each of them had received."""
    server = await asyncio.to_thread(serve)
    with ended(server):
        before = ranks(server)
        await check(server, "scheduler", kill, (0, 1, 2, 5, 9, 17, 30))
        assert ranks(server) == before and len(before) == TP

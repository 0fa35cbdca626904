"""Tensor-parallel ranks behind the real command, killed or frozen at many tokens: the answers stay as they were."""

import asyncio
import contextlib
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import gateway_toys
from tests.chaos.test_real_model import SILENCE_S, answers, check, kill
from tests.e2e.serving import Served, ended, until
from tests.integration.test_parallel_models import write

TP = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 6 heads and 3 KV heads with a tokenizer: its ranks are ready soon, its steps cost nothing."""
    folder, tokenizer = tmp_path_factory.mktemp("tiny"), gateway_toys.byte_level()
    gateway_toys.write_model(folder, tokenizer)
    shape = {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": tokenizer.get_vocab_size()}
    write(folder, {"architectures": ["LlamaForCausalLM"], "eos_token_id": 2} | shape)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def serve(*flags: str, size: int = TP) -> Served:
    return Served(f"--tensor-parallel-size={size}", "--device=cpu", f"--silence-s={SILENCE_S}", "--dtype=float32", *flags)


def ranks(server: Served) -> list[int]:
    """Process ids of all ranks, by rank; empty while there is no whole group."""
    launcher = server.children().get("gpu_worker", 0)
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                status = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                words = (folder / "cmdline").read_text().split("\0")
                if int(status[1]) == launcher and status[0] != "Z" and "gpu_worker.parallel.rank" in words:
                    found[int(words[words.index("gpu_worker.parallel.rank") + 1])] = int(folder.name)
    return [pid for _, pid in sorted(found.items())] if len(found) == TP else []


def worker_metrics(server: Served) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port + 1}/metrics", timeout=10) as answer:
        found: bytes = answer.read()
    return found


def kill_rank(server: Served, rank: int) -> None:
    old = ranks(server)
    os.kill(old[rank], signal.SIGKILL)
    until(lambda: ranks(server) and not set(ranks(server)) & set(old), 60)


def freeze_rank(server: Served, rank: int) -> None:
    """It never wakes: the others give it up, and the group is started again."""
    old = ranks(server)
    os.kill(old[rank], signal.SIGSTOP)
    until(lambda: ranks(server) and not set(ranks(server)) & set(old), 60)


def pause_rank(server: Served, rank: int) -> None:
    """Shorter than the others' patience, so that all of them go on."""
    old = ranks(server)
    os.kill(old[rank], signal.SIGSTOP)
    time.sleep(SILENCE_S / 3)
    os.kill(old[rank], signal.SIGCONT)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("harm", [kill_rank, freeze_rank, pause_rank])
async def test_a_rank_at_many_positions(tiny: Path, rank: int, harm: Callable[[Served, int], None]) -> None:
    server = await asyncio.to_thread(serve, str(tiny))
    with ended(server):
        await check(server, "gpu_worker", lambda each, _: harm(each, rank), (0, 1, 9, 25))


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_the_scheduler_at_many_positions(tiny: Path) -> None:
    """No rank is started again: all keep their weights and pages, whatever plans each of them had received."""
    server = await asyncio.to_thread(serve, str(tiny))
    with ended(server):
        before = ranks(server)
        await check(server, "scheduler", kill, (0, 1, 2, 5, 9, 17, 25))
        assert ranks(server) == before and len(before) == TP
        assert b"quire_worker_steps_total" in await asyncio.to_thread(worker_metrics, server)  # rank 0 speaks for all


@pytest.mark.timeout(170)
async def test_a_killed_rank_in_mid_stream(tiny: Path) -> None:
    """Three ranks say what one worker says, also while one of them is killed."""
    one = await asyncio.to_thread(serve, str(tiny), size=1)
    with ended(one):
        right = await answers(one, lambda _: None)
    server = await asyncio.to_thread(serve, str(tiny))
    with ended(server):
        assert await answers(server, lambda _: None) == right
        await check(server, "gpu_worker", lambda each, _: kill_rank(each, 1), (9,))
        server.signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.wait) == 0


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(600)
async def test_smollm2_on_three_ranks(smollm2_folder: Path) -> None:
    """9 heads and 3 KV heads."""
    found = []
    for size in (1, TP):
        server = await asyncio.to_thread(serve, size=size)
        with ended(server):
            found.append(await answers(server, lambda _: None))
    assert found[0] == found[1]

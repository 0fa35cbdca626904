"""What every rank is started with, and how the ends of ranks become one end."""

import asyncio
import sys
import time

import pytest

from gpu_worker.parallel import launcher
from quire import roles
from shared import gpus
from shared.config import BadConfig, Config

FOUR = Config(tensor_parallel_size=4)


def show(monkeypatch: pytest.MonkeyPatch, *ids: str) -> None:
    monkeypatch.setattr(gpus, "gpu_ids", lambda: list(ids))


def test_every_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, "4", "5", "6", "7")
    assert launcher.rank_devices(FOUR) == ["4", "5", "6", "7"]
    show(monkeypatch)
    assert launcher.rank_devices(FOUR) == [""] * 4


@pytest.mark.parametrize(("ids", "device"), [(("0", "1", "2"), "auto"), ((), "cuda"), (("0",), "cuda")])
def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch, ids: tuple[str, ...], device: str) -> None:
    show(monkeypatch, *ids)
    with pytest.raises(BadConfig, match=f"tensor_parallel_size = 4: this machine shows {len(ids)} GPUs"):
        launcher.rank_devices(Config(tensor_parallel_size=4, device=device))


def test_ranks_share_a_cpu_and_speak_with_one_voice() -> None:
    config = Config(tensor_parallel_size=2, cpu_threads=7, metrics_port=9100)
    first, second = (launcher.rank_config(config, rank, "r", on_cpu=True) for rank in (0, 1))
    assert (first.cpu_threads, first.device, first.name, first.metrics_port) == (3, "cpu", "r", 9100)
    assert (second.cpu_threads, second.name, second.metrics_port, second.log_level) == (3, "r", 0, "warning")
    assert launcher.rank_config(config, 0, "r", on_cpu=False).device == "cuda"


@pytest.mark.parametrize(
    ("codes", "expected"),
    [(("exit(0)", "exit(0)"), 0), (("exit(2)", "import time; time.sleep(60)"), 2), (("import os; os.kill(os.getpid(), 9)",
     "import time; time.sleep(60)"), -9), (("exit(0)", "import time; time.sleep(0.3); exit(5)"), 0)],
)  # fmt: skip
async def test_ranks_end_together(codes: tuple[str, ...], expected: int) -> None:
    ranks = [await asyncio.create_subprocess_exec(sys.executable, "-c", code) for code in codes]
    began = time.monotonic()
    assert await launcher._first_end(ranks) == expected
    assert time.monotonic() - began < 30 and all(rank.returncode is not None for rank in ranks)


def test_a_machine_of_several_gpus_holds_as_many_copies_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, "0", "1", "2", "3", "4")
    made = roles.make_roles(Config(tensor_parallel_size=2, model="m"), gateway=False)
    assert [role.name for role in made] == ["scheduler", "gpu_worker-0-1", "gpu_worker-2-3"]
    assert [role.environment["CUDA_VISIBLE_DEVICES"] for role in made[1:]] == ["0,1", "2,3"]
    one = roles.make_roles(Config(model="m"), gateway=False)
    assert [role.name for role in one[1:]] == [f"gpu_worker-{number}" for number in range(5)]
    with pytest.raises(BadConfig, match="tensor_parallel_size = 8: this machine shows 5 GPUs"):
        roles.make_roles(Config(tensor_parallel_size=8, model="m"), gateway=False)
    watched = roles.make_roles(Config(tensor_parallel_size=2, model="m", metrics_port=9100), gateway=True)
    ports = {role.name: next(flag for flag in role.command if "--metrics-port" in flag)[-4:] for role in watched}
    assert ports == {"scheduler": "9100", "gpu_worker-0-1": "9101", "gpu_worker-2-3": "9102", "gateway": "9103"}
    show(monkeypatch)
    (_, worker) = roles.make_roles(Config(tensor_parallel_size=8, model="m"), gateway=False)
    assert worker.name == "gpu_worker" and worker.environment["CUDA_VISIBLE_DEVICES"] == ""

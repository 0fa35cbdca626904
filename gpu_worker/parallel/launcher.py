"""Starts the ranks of one replica on this machine and ends them together: a group without one of its ranks is of no use.

This process has no torch. It ends as the first of its ranks did; whoever started it starts it again.
"""

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping

from shared import config as settings
from shared import gpus
from shared.config import FATAL_EXIT, BadConfig, Config
from shared.process import dies_with_parent, usable_cores

END_S = 15.0  # for the other ranks, once one has ended by itself


def main(config: Config) -> int:
    """Run all ranks until one ends; the exit code."""
    try:
        devices = rank_devices(config)
    except BadConfig as error:
        print(f"gpu_worker: error: {error}", file=sys.stderr)
        return FATAL_EXIT
    return asyncio.run(_run(config, devices))


def rank_devices(config: Config) -> list[str]:
    """CUDA_VISIBLE_DEVICES of every rank; empty texts on a CPU. BadConfig when there are more ranks than GPUs."""
    size = config.tensor_parallel_size
    found = [] if config.device == "cpu" else gpus.gpu_ids()
    if not found and config.device != "cuda":
        return [""] * size
    if len(found) < size:
        raise BadConfig(f"tensor_parallel_size = {size}: this machine shows {len(found)} GPUs, each rank needs one")
    return found[:size]


def rank_config(config: Config, rank: int, name: str, *, on_cpu: bool) -> Config:
    """The settings of one rank: all of a replica have its name, the first speaks for it, a CPU is divided."""
    size, cores = config.tensor_parallel_size, usable_cores()
    return dataclasses.replace(
        config,
        name=name,
        metrics_port=config.metrics_port if rank == 0 else 0,
        log_level="warning" if rank and config.log_level == "info" else config.log_level,
        device="cpu" if on_cpu else "cuda",
        cpu_threads=max(1, (config.cpu_threads or cores) // size) if on_cpu else config.cpu_threads,
    )


async def _run(config: Config, devices: list[str]) -> int:
    name = config.name or f"{socket.gethostname()}-{os.getpid()}"
    ranks: list[asyncio.subprocess.Process] = []
    stopping = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        stopping.set()
        _signal_all(ranks, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    with socket.create_server(("127.0.0.1", 0), backlog=len(devices) * 8) as listener:
        group = secrets.randbits(62) + 1
        for rank, device in enumerate(devices):
            own = rank_config(config, rank, name, on_cpu=not device)
            ranks.append(await _start(own, rank, group, listener, os.environ | {"CUDA_VISIBLE_DEVICES": device}))
    if stopping.is_set():  # told so while they were being started
        _signal_all(ranks, signal.SIGTERM)
    code = await _first_end(ranks)
    if code >= 0:
        return code
    if stopping.is_set() and -code in (signal.SIGTERM, signal.SIGINT):  # it had no handler yet
        return 0
    print(f"gpu_worker: a rank was killed by {signal.Signals(-code).name}", file=sys.stderr)
    return 1


async def _start(
    config: Config, rank: int, group: int, listener: socket.socket, environment: Mapping[str, str]
) -> asyncio.subprocess.Process:
    """The listening socket of the group's store goes to rank 0: no port is chosen twice."""
    environment = {name: value for name, value in environment.items() if not name.startswith("QUIRE_")}
    port, descriptor = listener.getsockname()[1], listener.fileno()
    seat = [str(number) for number in (rank, config.tensor_parallel_size, group, port, descriptor if rank == 0 else -1)]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gpu_worker.parallel.rank",
        *seat,
        *settings.to_flags(config),
        env=environment | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=[descriptor] if rank == 0 else [],
        preexec_fn=dies_with_parent(),
    )


async def _first_end(ranks: list[asyncio.subprocess.Process]) -> int:
    """Wait for the first rank to end, let the others follow (an orderly end) or kill them; its code, negative: a signal."""
    waits = {asyncio.create_task(rank.wait()) for rank in ranks}
    ended, running = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    codes = [task.result() for task in ended]
    first = next((code for code in codes if code), 0)
    if running and not first:
        _, running = await asyncio.wait(running, timeout=END_S)
    _signal_all(ranks, signal.SIGKILL)
    if running:
        await asyncio.wait(running)
    return first


def _signal_all(ranks: list[asyncio.subprocess.Process], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                rank.send_signal(number)

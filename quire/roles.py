"""What has to run on this machine for one model: its folder, its addresses, and one process per role."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from quire import machine
from quire.supervisor import Role
from shared import config as settings
from shared import gpus, model_folder, model_store
from shared.config import BadConfig, Config


def prepare(config: Config) -> tuple[Config, Path]:
    """The settings every role gets: a folder for the model, its name, real ports. BadConfig or ModelError says what fails."""
    folder = model_store.resolve(config.model, config.cache_dir).resolve()
    model_folder.check(folder, weights=not config.dummy_weights)
    port, gateways, workers = machine.free_ports(3)
    default = Config()
    ready = dataclasses.replace(
        config,
        model=str(folder),
        served_model_name=config.served_model_name or model_store.default_name(config.model),
        port=config.port or port,
        gateway_link=_own(config.gateway_link, default.gateway_link, gateways),
        worker_link=_own(config.worker_link, default.worker_link, workers),
    )
    _check_ports(config)
    _check_start(ready)
    return ready, folder


def _check_ports(config: Config) -> None:
    """BadConfig when a chosen port is taken: said now, not by a role that ends while others already listen."""
    wanted = {"admin_port": ("127.0.0.1", config.admin_port)}
    if config.metrics_port:
        for number in range(2 + len(_replicas(config))):  # scheduler, workers, gateway
            wanted[f"metrics_port + {number}" if number else "metrics_port"] = config.metrics_host, config.metrics_port + number
    for name in ("gateway_link", "worker_link"):
        link = urlsplit(getattr(config, name))
        if getattr(config, name) != getattr(Config(), name) and link.scheme == "tcp" and link.hostname:
            wanted[name] = link.hostname, link.port or 0
    for name, (host, port) in wanted.items():
        if port and (reason := machine.why_not_bound(host, port)):
            raise BadConfig(f"{name} = {port}: cannot listen on {host} port {port}: {reason}")


def _check_start(config: Config) -> None:
    """BadConfig with what the worker would refuse, as far as it knows without torch (gpu_worker/check.py)."""
    command = [sys.executable, "-m", "gpu_worker.check", *settings.to_flags(config)]
    ran = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if ran.returncode:
        *_, why = ran.stderr.splitlines() or [f"gpu_worker.check ended with {ran.returncode}"]
        raise BadConfig(why)


def _own(link: str, default: str, port: int) -> str:
    """A link address that was not chosen by a person gets a free port, so that two servers fit on one machine."""
    return f"tcp://127.0.0.1:{port}" if link == default else link


def _replicas(config: Config) -> list[list[str]]:
    """The GPUs of each copy of the model, as many copies as there is room for; one copy without any on a CPU."""
    found = [] if config.device == "cpu" else gpus.gpu_ids()
    size = config.tensor_parallel_size
    if not found and config.device == "cuda":
        raise BadConfig("device = 'cuda': this machine shows no GPU (nvidia-smi, CUDA_VISIBLE_DEVICES)")
    if 0 < len(found) < size:
        raise BadConfig(f"tensor_parallel_size = {size}: this machine shows {len(found)} GPUs, each rank needs one")
    return [found[first : first + size] for first in range(0, len(found) - size + 1, size)] or [[]]


def _environment() -> dict[str, str]:
    """Of all child processes. They read only their flags: the environment of this process is already in the settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    root = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def make_roles(config: Config, *, gateway: bool) -> list[Role]:
    """The processes of this machine."""
    environment = _environment()

    def role(module: str, name: str, number: int = 0, **more: str) -> Role:
        metrics_port = config.metrics_port + number if config.metrics_port else 0  # one each: scheduler, workers, gateway
        own = dataclasses.replace(config, name="-".join(filter(None, (config.name, name))), metrics_port=metrics_port)
        return Role(name, [sys.executable, "-m", module, *settings.to_flags(own)], environment | more)

    workers = [
        role("gpu_worker", "-".join(("gpu_worker", *devices)), 1 + place, CUDA_VISIBLE_DEVICES=",".join(devices))
        for place, devices in enumerate(_replicas(config))
    ]
    return [role("scheduler", "scheduler"), *workers, *([role("gateway", "gateway", 1 + len(workers))] if gateway else [])]

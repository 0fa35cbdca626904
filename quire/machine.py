"""What this machine offers to a server: GPUs and free ports. Imports nothing heavy."""

import os
import shutil
import socket
import subprocess


def gpu_ids() -> list[str]:
    """Ids of the GPUs this process may use, as CUDA_VISIBLE_DEVICES takes them; empty without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return []
    try:
        listed = subprocess.run([nvidia_smi, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return []
    installed = [str(number) for number, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU ")]
    if listed.returncode or not installed:
        return []
    return [each.strip() for each in visible.split(",")] if visible else installed


def why_not_bound(host: str, port: int) -> str:
    """Empty when a server may listen at host:port, else the reason."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)  # two sockets with SO_REUSEADDR may both bind, but only one may listen
    except OSError as error:
        return str(error.strerror or error)
    return ""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports nobody listens on now; all held until the last is found, so that they differ."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()

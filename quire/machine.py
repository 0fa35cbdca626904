"""Which addresses and ports of this machine a server may use. Imports nothing heavy."""

import socket


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

"""quire drain: send one worker away without harm; what it computes moves to others at once."""

import argparse
import http.client
import json
import sys
from urllib.parse import quote

from shared import config as settings
from shared.config import FATAL_EXIT, BadConfig

TIMEOUT_S = 10.0


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "send a worker away: its sequences move to others at once, then its process ends"
    parser = commands.add_parser("drain", help=text, description=f"{text.capitalize()}. Asks a gateway of this machine.")
    parser.add_argument("worker", metavar="WORKER", help="name of the worker, as in the scheduler's log and metrics")
    parser.add_argument("--admin-port", dest="admin_port", help="the gateway's --admin-port (default: QUIRE_ADMIN_PORT)")
    parser.add_argument("--config", help="TOML file of settings")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """0: the worker is leaving. 1: it is not, and why."""
    try:
        port = settings.load(parsed).admin_port
        if not port:
            raise BadConfig("admin_port = 0: name the port that the gateway was started with (--admin-port)")
    except BadConfig as error:
        print(f"quire: error: {error}", file=sys.stderr)
        return FATAL_EXIT
    try:
        status, answer = _post(port, f"/drain/{quote(parsed.worker, safe='')}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"quire: error: no gateway answers on 127.0.0.1 port {port}: {error}", file=sys.stderr)
        return 1
    if status != 200:
        print(f"quire: error: {answer['error']['message']}", file=sys.stderr)
        return 1
    print(f"{parsed.worker} leaves; {answer['moved_sequences']} of its sequences moved")
    return 0


def _post(port: int, path: str) -> "tuple[int, dict[str, dict[str, str]]]":
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()

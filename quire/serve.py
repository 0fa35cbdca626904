"""quire serve: the three roles on this machine, from one command to one address; drained on Ctrl-C."""

import argparse
import asyncio
import json
import signal
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire import machine, roles
from quire.supervisor import Supervisor
from shared import config as settings
from shared import model_folder
from shared.config import FATAL_EXIT, BadConfig, Config
from shared.model_folder import ModelError
from shared.output import STDERR, STDOUT, Output

DRAIN_S = 30.0  # how long streams may still run after the first Ctrl-C
END_S = 5.0  # how long the scheduler and the workers may take to end after that
POLL_S = 0.25


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("serve", help="serve a model on this machine", description="Serve a model on this machine.")
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="the same as --model")
    settings.add_flags(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit code. A start that cannot succeed prints one line."""
    try:
        config = settings.load(_with_model(parsed))
        if reason := machine.why_not_bound(config.host, config.port):
            raise BadConfig(f"cannot listen on {config.host} port {config.port}: {reason}")
        config, folder = roles.prepare(config)
        return asyncio.run(_serve(config, folder))
    except (BadConfig, ModelError) as error:
        print(f"quire: error: {error}", file=sys.stderr)
        return FATAL_EXIT
    except KeyboardInterrupt:
        return 130


def _with_model(parsed: argparse.Namespace) -> argparse.Namespace:
    if parsed.model_argument is not None:
        if parsed.model is not None and parsed.model != parsed.model_argument:
            raise BadConfig(f"two models are named: {parsed.model_argument!r} and --model {parsed.model!r}")
        parsed.model = parsed.model_argument
    return parsed


async def _serve(config: Config, folder: Path) -> int:
    """Run the roles until a signal or a role that cannot be kept alive."""
    started = time.monotonic()
    processes = roles.make_roles(config, gateway=True)
    output = Output(STDERR)

    def say(text: str) -> None:
        output.write(f"quire: {text}\n")

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    supervisor = Supervisor(processes, say=say, write=output.write)

    code = 0  # of this process; 128 + signal, as shells have it, when not even the end was waited for

    def on_signal(number: signal.Signals) -> None:
        nonlocal code
        if stop.is_set():
            code = 128 + number
            supervisor.kill()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    say(f"starting {', '.join(role.name for role in processes)}; the model is {config.served_model_name} from {folder}")
    announcer = asyncio.create_task(_announce(config, folder, supervisor, started, say))
    stopped = asyncio.create_task(stop.wait())
    try:
        ends: list[asyncio.Future[Any]] = [stopped, supervisor.failed, announcer]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if announcer.done():  # it never returns by itself
            announcer.result()
        if supervisor.failed.done():
            say(f"error: {supervisor.failed.result()}")
            return FATAL_EXIT
        say("draining: streams may end, nothing new is accepted; Ctrl-C again ends at once")
        await supervisor.stop(["gateway"], DRAIN_S)
        await supervisor.stop([name for name in supervisor.roles if name not in ("gateway", "scheduler")], END_S)
        await supervisor.stop(["scheduler"], END_S)
        return code
    finally:
        announcer.cancel()
        stopped.cancel()
        await supervisor.close()


async def _announce(config: Config, folder: Path, supervisor: Supervisor, started: float, say: Callable[[str], None]) -> None:
    """Watch /ready; print the address when the server first answers, and a line whenever it is ready again."""
    ready = False
    while True:
        was, ready = ready, await _is_ready(config)
        if ready and not was:
            if supervisor.was_ready:
                say("ready again")
            else:
                Output(STDOUT).write(_banner(config, folder, time.monotonic() - started))
        elif was and not ready:
            say("not ready")
        if ready:
            supervisor.mark_ready()
        await asyncio.sleep(POLL_S if not ready else 4 * POLL_S)


async def _is_ready(config: Config) -> bool:
    try:
        async with asyncio.timeout(2.0):
            # Our own child on our own machine: what its certificate says does not matter here.
            encrypted = ssl._create_unverified_context() if config.tls_cert else None
            reader, writer = await asyncio.open_connection(_reachable(config.host), config.port, ssl=encrypted)
            try:
                writer.write(b"GET /ready HTTP/1.1\r\nHost: quire\r\nConnection: close\r\n\r\n")
                status = await reader.readline()
            finally:
                writer.close()
        return status.split()[1:2] == [b"200"]
    except (OSError, TimeoutError):
        return False


def _reachable(host: str) -> str:
    """An address of this machine for a server that listens on all of them."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def _banner(config: Config, folder: Path, start_s: float) -> str:
    host = _reachable(config.host)
    base = f"http{'s' if config.tls_cert else ''}://{f'[{host}]' if ':' in host else host}:{config.port}/v1"
    question = "Tell me the capital of France in one sentence."
    body: dict[str, object] = {"model": config.served_model_name, "temperature": 0}
    if has_chat_template(folder):
        path, body["messages"] = "chat/completions", [{"role": "user", "content": question}]
    else:
        path, body["prompt"] = "completions", "The capital of France is"
    curl = f"curl {base}/{path} -H 'Content-Type: application/json' \\\n    -d '{json.dumps(body)}'"
    return f"\nReady in {start_s:.1f} s: {base}  model {config.served_model_name}\n\n  {curl}\n\nCtrl-C drains and ends.\n\n"


def has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and bool(model_folder.read_json(path).get("chat_template"))

"""Runs the roles of one machine as child processes: output prefixed, restarted when they die, never orphaned."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from shared.config import FATAL_EXIT
from shared.process import dies_with_parent

QUICK_S = 30.0  # a process that lived shorter than this counts as failed at once
SETTLED_S = 2.0  # whoever runs for so long while the server is ready is counted as well
MAX_QUICK = 5  # quick ends in a row before we give up (never, once the server was ready and it crashes)
MAX_BACKOFF_S = 10.0
PROGRESS_S = 1.0  # without a terminal, a progress bar is printed this often


@dataclass
class Role:
    """One process to keep alive. A replica's worker is a role of its own."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    quick_ends: int = 0
    process: asyncio.subprocess.Process | None = None
    last_words: str = ""  # its newest line of the form "<module>: text"
    stopping: bool = False
    started: float = field(default=0.0)


class GaveUp(RuntimeError):
    """A role that cannot be kept alive; the text is one line for a person."""


def last_words(role: Role, code: int) -> str:
    """Why a process ended, as far as it or the kernel said."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return role.last_words or f"exit code {code}"


def next_start(role: Role, code: int, lived_s: float, was_ready: bool) -> float:
    """Seconds until the role that ended is started again; GaveUp when that is useless. Counts its quick ends.

    Once the server was ready the settings are known to be good and streams may wait for this role: what crashes is started
    again for ever. What looks fatal (a port, memory) may be the remains of the process that just died: it gets a few tries.
    """
    words = last_words(role, code)
    if code == FATAL_EXIT and not was_ready:
        raise GaveUp(words)
    role.quick_ends = role.quick_ends + 1 if lived_s < QUICK_S or not was_ready else 1
    if role.quick_ends >= MAX_QUICK and (code == FATAL_EXIT or not was_ready):
        raise GaveUp(f"{role.name} ended {role.quick_ends} times in a row, last: {words}")
    return min(MAX_BACKOFF_S, 0.125 * 2.0 ** min(role.quick_ends, 10))


class Supervisor:
    """Starts roles and keeps them alive. Everything happens on the running loop, in the main thread."""

    def __init__(self, roles: Iterable[Role], say: Callable[[str], None], write: Callable[[str], object] | None = None) -> None:
        """say: lines of our own. write: what the roles print, with its line ends; None: to stderr."""
        self.roles = {role.name: role for role in roles}
        self.was_ready = False
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why we gave up
        self._say = say
        self._write = write or _to_stderr
        self._killed = asyncio.Event()
        self._width = max(len(name) for name in self.roles)
        self._keepers = [asyncio.create_task(self._keep(role)) for role in self.roles.values()]

    def mark_ready(self) -> None:
        """The server answers: roles that run for a moment have proved themselves, and later ends are counted afresh."""
        self.was_ready = True
        for role in self.roles.values():
            if time.monotonic() - role.started >= SETTLED_S:
                role.quick_ends = 0

    async def stop(self, names: Iterable[str], grace_s: float) -> None:
        """Ask these roles to drain and wait; what has not ended after grace_s is killed."""
        stopped = [self.roles[name] for name in names]
        for role in stopped:
            role.stopping = True
            _signal(role, signal.SIGTERM)
        waits = [asyncio.create_task(role.process.wait()) for role in stopped if role.process is not None]
        if waits:
            _, late = await asyncio.wait(waits, timeout=grace_s)
            if late:
                self._say(f"{len(late)} of {', '.join(role.name for role in stopped)} did not end in {grace_s:.0f} s")
        for role in stopped:
            _kill(role)
        if waits:
            await asyncio.wait(waits)

    def kill(self) -> None:
        """End everything at once."""
        self._killed.set()
        for role in self.roles.values():
            role.stopping = True
            _kill(role)

    async def close(self) -> None:
        """Kill what still runs, and wait until nothing does: a keeper ends when all that its role printed is read."""
        self.kill()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _keep(self, role: Role) -> None:
        while not role.stopping:
            code = await self._run_once(role)
            if role.stopping:
                return
            try:
                delay_s = next_start(role, code, time.monotonic() - role.started, self.was_ready)
            except GaveUp as error:
                if not self.failed.done():
                    self.failed.set_result(str(error))
                return
            self._say(f"{role.name} ended ({last_words(role, code)}), starting it again in {delay_s:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._killed.wait(), delay_s)

    async def _run_once(self, role: Role) -> int:
        role.started, role.last_words = time.monotonic(), ""
        role.process = await asyncio.create_subprocess_exec(
            *role.command,
            env=role.environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            process_group=0,  # Ctrl-C in the terminal reaches only us: we decide the order in which roles end
            preexec_fn=dies_with_parent(),
        )
        if role.stopping:  # asked to end while it was being started
            _kill(role)
        assert role.process.stdout is not None
        await self._pass_on(role, role.process.stdout)
        return await role.process.wait()

    async def _pass_on(self, role: Role, output: asyncio.StreamReader) -> None:
        """Pass a role's output on, line by line, its name in front."""
        lines = Lines(sys.stderr.isatty())
        while chunk := await output.read(2**16):
            for line, end in lines.feed(chunk, time.monotonic()):
                module = role.name.split("-")[0]
                if line.startswith(f"{module}: "):  # not a log line: why it cannot go on
                    role.last_words = line.strip().replace(": error: ", ": ", 1)
                    continue  # said once, when its end is reported
                self._write(f"{role.name:<{self._width}} | {line}{end}")


def _to_stderr(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk, or nobody at the other end: no reason to stop listening to the roles
        print(text, end="", file=sys.stderr, flush=True)


def _signal(role: Role, number: signal.Signals) -> None:
    if role.process is not None and role.process.returncode is None:
        role.process.send_signal(number)


def _kill(role: Role) -> None:
    """With the processes that it started (ranks, templates): whoever keeps its pipe open would keep us waiting."""
    if role.process is not None and role.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(role.process.pid, signal.SIGKILL)


class Lines:
    """Cuts output into lines. A progress bar (lines ended by a carriage return) is redrawn in place, or thinned in a log."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        self._rest = b""
        self._drawn = float("-inf")  # when a bar was last passed on

    def feed(self, chunk: bytes, now: float) -> list[tuple[str, str]]:
        """The complete lines so far, each with what to print after it."""
        *parts, self._rest = (self._rest + chunk).replace(b"\r\n", b"\n").splitlines(keepends=True) or [b""]
        if self._rest.endswith((b"\n", b"\r")):
            parts.append(self._rest)
            self._rest = b""
        out = []
        for part in parts:
            line = part[:-1].decode("utf-8", "replace")
            if not line.strip():
                continue
            if part.endswith(b"\n"):
                out.append((line, "\n"))
            elif self._terminal:
                out.append((line, "\x1b[K\r"))
            elif now - self._drawn >= PROGRESS_S:
                self._drawn = now
                out.append((line, "\n"))
        return out

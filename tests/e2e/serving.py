"""The real thing as a child process: quire serve (or one role), its output, its address, its metrics."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from quire.machine import why_not_bound

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "Tell me the capital of France in one sentence."
START_S = 90.0


class Process:
    """A command of ours with all it prints, line by line."""

    def __init__(self, *arguments: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
        self._child = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env=environment | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        self.pid = self._child.pid
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self.lines.append(line.rstrip("\n"))

    def say(self, text: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(text)
        self._child.stdin.flush()

    def hang_up(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()

    @property
    def code(self) -> int | None:
        return self._child.poll()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, timeout_s: float = START_S, since: int = 0) -> re.Match[str]:
        """The first line after the given one that matches; AssertionError with all output when none comes."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.code is not None
            for line in self.lines[since:]:
                if found := re.search(pattern, line):
                    return found
            assert not ended and time.monotonic() < deadline, f"no {pattern!r} in:\n{self.text}"
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def wait(self, timeout_s: float = 30.0) -> int:
        code = self._child.wait(timeout_s)
        self._reader.join(5)
        return code

    def end(self) -> None:
        """Leave nothing running, whatever state it is in."""
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()
        self.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def children(self) -> dict[str, int]:
        """Role -> process id of the living child processes."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                status = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                if int(status[1]) == self.pid and status[0] != "Z":
                    words = (folder / "cmdline").read_text().split("\0")
                    if "-m" in words:
                        found[words[words.index("-m") + 1]] = int(folder.name)
        return found


class Served(Process):
    """quire serve on free ports, ready to answer."""

    def __init__(self, *flags: str) -> None:
        self.metrics_port = _free_ports()
        super().__init__("quire.main", "serve", "--port=0", f"--metrics-port={self.metrics_port}", *flags)
        try:
            found = self.wait_for(r"^Ready in \S+ s: (http://\S+)  model (\S+)")
        except BaseException:
            self.end()
            raise
        self.url, self.model = found[1], found[2]

    @property
    def root_url(self) -> str:
        return self.url.removesuffix("/v1")

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the scheduler's samples of this name that carry these labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        assert samples, f"no metric {name}"
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def _free_ports() -> int:
    """The first of three free ports for the metrics of scheduler, worker and gateway. Below those the kernel hands out."""
    while True:
        port = random.randrange(20_000, 32_000)
        if not any(why_not_bound("127.0.0.1", each) for each in range(port, port + 3)):
            return port


@contextlib.contextmanager
def ended(process: Process) -> Iterator[None]:
    """End the process when the block ends, and show what it printed when the block fails."""
    try:
        yield
    except BaseException:
        print(process.text)
        raise
    finally:
        process.end()


def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False

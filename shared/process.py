"""Child processes that cannot outlive their parent, threads that wait without spinning, locks between processes."""

import ctypes
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux only; elsewhere children are merely asked to end


def dies_with_parent() -> Callable[[], None]:
    """A preexec_fn: the kernel kills the child when the thread that starts it ends, however it ends."""
    parent = os.getpid()

    def in_child() -> None:
        if _prctl is None:
            return
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return in_child


def wait_quietly() -> None:
    """Read by the OpenMP runtime when torch loads it. Threads that wait by spinning steal the cores they wait for as soon
    as other processes run beside them."""
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold an exclusive lock file. The kernel frees it when the last process that inherited the descriptor ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)

"""Child processes that cannot outlive their parent, cores and threads, locks between processes."""

import ctypes
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


def usable_cores(control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process can keep busy: those it may run on, and no more than its container's CPU limit pays for.
    More threads would all stand still for the rest of a period once they have spent what it allows."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # cgroup v2: "max 100000" without a limit
        quota, period = (control_group / "cpu.max").read_text().split()
        return min(cores, max(1, int(quota) // int(period)))
    with suppress(OSError, ValueError):  # v1: -1 without a limit
        quota, period = ((control_group / f"cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return min(cores, max(1, int(quota) // int(period))) if int(quota) > 0 else cores
    return cores


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

"""Child processes that cannot outlive their parent."""

import ctypes
import os
import signal
from collections.abc import Callable

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

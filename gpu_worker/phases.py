"""What a worker's start took, phase by phase, from the birth of the process: for its log and its metrics."""

import os
import time
from pathlib import Path


class Phases:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.time() - _process_age_s()

    def end(self, name: str) -> None:
        """What happened since the last end was the phase of this name."""
        now = time.time()
        self.seconds[name] = self.seconds.get(name, 0.0) + max(now - self._since, 0.0)
        self._since = now


def _process_age_s() -> float:
    """0 where /proc does not say (proc(5): field 22 of stat, in ticks since the machine started)."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return 0.0
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")

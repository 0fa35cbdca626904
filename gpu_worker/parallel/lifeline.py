"""Notices that another rank is dead or frozen, while a collective or a device would wait for it for ever."""

import threading
import time

from gpu_worker.parallel.group import Group, leave


class Lifeline:
    """Every rank counts aloud in the store. Whoever stands still while this process does not has broken the group."""

    def __init__(self, group: Group, beat_s: float, silence_s: float) -> None:
        self._group = group
        self._beat_s = beat_s
        self._silence_s = silence_s
        self._store = group.store(silence_s)
        self._round_at = 0.0  # when the store last answered; 0: not started
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lifeline", daemon=True)

    def start(self) -> None:
        self._round_at = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()

    def check(self) -> None:
        """For another thread, now and then: rank 0 keeps the store, and while it is frozen nobody gets an answer."""
        silent_s = time.monotonic() - self._round_at
        if self._round_at and silent_s > 1.5 * self._silence_s and not self._ending.is_set():
            leave(f"rank 0 has been silent for {silent_s:.1f} s")

    def _run(self) -> None:
        others = [rank for rank in range(self._group.size) if rank != self._group.rank]
        counts = dict.fromkeys(others, b"")
        heard = dict.fromkeys(others, 0.0)  # 0: not yet, it may still be loading
        beat, since = 0, time.monotonic()
        while not self._ending.wait(self._beat_s):
            beat += 1
            now = time.monotonic()
            if now - since > self._silence_s / 2:  # this process stood still itself, and so may have everybody
                heard = {rank: now if when else 0.0 for rank, when in heard.items()}
            since = now
            try:
                self._store.set(f"alive/{self._group.rank}", str(beat))
                for rank in others:
                    count = self._store.get(f"alive/{rank}") if self._store.check([f"alive/{rank}"]) else b""
                    if count != counts[rank]:
                        counts[rank], heard[rank] = count, time.monotonic()
            except RuntimeError:
                if not self._ending.is_set():
                    leave("rank 0 is gone")
                return
            self._round_at = time.monotonic()
            for rank, when in heard.items():
                if when and now - when > self._silence_s:
                    leave(f"rank {rank} has been silent for {now - when:.1f} s")

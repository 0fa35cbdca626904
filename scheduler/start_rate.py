"""How fast waiting sequences start: the base of every predicted wait."""

import math

WINDOW_S = 30.0  # older starts are forgotten exponentially
LEAST_S = 1.0  # of waiting seen, before anything is predicted
UNKNOWN = 0.0


class StartRate:
    """Starts per second of the time in which somebody waited. What starts at once says nothing about the next queue."""

    __slots__ = ("_busy_s", "_last", "_starts", "_waiting")

    def __init__(self) -> None:
        self._starts = 0.0  # while somebody waited
        self._busy_s = 0.0
        self._last = 0.0
        self._waiting = False  # since _last

    def on_queue(self, now: float, waiting: bool) -> None:
        """The queue is (waiting) or is not empty from now on."""
        if self._waiting and now > self._last:
            fade = math.exp(-(now - self._last) / WINDOW_S)
            self._starts *= fade
            self._busy_s = self._busy_s * fade + (now - self._last)
        self._last, self._waiting = now, waiting

    def on_start(self, now: float, waiting: bool) -> None:
        """A sequence left the queue for its first plan; waiting: others are still in it."""
        was_waiting = self._waiting
        self.on_queue(now, waiting)
        self._starts += was_waiting

    def per_s(self, now: float) -> float:
        """UNKNOWN until enough waiting was seen."""
        self.on_queue(now, self._waiting)
        return max(self._starts, 0.5) / self._busy_s if self._busy_s >= LEAST_S else UNKNOWN

"""What became of each sequence: a log line under the id of its request, and spans where that is traced."""

import logging
import time
from collections import deque

from scheduler.sequence import Sequence
from shared.tracing import Tracer

log = logging.getLogger("quire.scheduler")


def phases(seq: Sequence, now: float) -> list[tuple[str, float, float]]:
    """(name, begin, end) in clock time of what it went through, one after the other; what it never reached is left out."""
    marks = [("queue", seq.queued_at), ("prefill", seq.bound_at), ("decode", seq.first_at)]
    reached = [(name, at) for name, at in marks if at]
    ends = [at for _, at in reached[1:]] + [now]
    return [(name, begin, end) for (name, begin), end in zip(reached, ends, strict=True)]


class Journal:
    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer

    def write(self, ended: deque[tuple[Sequence, str]], now: float) -> None:
        """Take note of all that ended just now."""
        wall = time.time() - now  # clock times are those of the event loop
        while ended:
            seq, reason = ended.popleft()
            spans = phases(seq, now)
            facts = {
                "reason": reason,
                "worker": seq.worker,
                "prompt": seq.num_prompt,
                "cached": max(seq.first_cached, 0),
                "output": seq.num_output,
                "preemptions": seq.preemptions,
                "starts": seq.num_binds,
            }
            level = logging.INFO if seq.request else logging.DEBUG
            if log.isEnabledFor(level):
                times = {f"{name}_ms": round(1000 * (end - begin), 1) for name, begin, end in spans}
                log.log(level, "ended", extra={"id": seq.request, "choice": seq.choice, **facts, **times})
            if self._tracer is not None and seq.trace:
                told = {f"quire.{name}": value for name, value in facts.items()}
                for name, begin, end in spans:
                    self._tracer.add(name, seq.trace, wall + begin, wall + end, told)

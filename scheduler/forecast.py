"""How long outputs will be, and how many pages a replica will need at its fullest: the reserve that keeps preemption rare."""

from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.replica import Replica
    from scheduler.sequence import Sequence

PRIOR = (64, 128, 256, 512, 1024)  # tokens; what a cell that has finished nothing yet expects
RECENT = 256  # outputs remembered
QUANTILE = 0.7


class OutputLengths:
    """Lengths of recently finished outputs."""

    __slots__ = ("_recent", "_sorted")

    def __init__(self) -> None:
        self._recent = deque(PRIOR, maxlen=RECENT)
        self._sorted = sorted(PRIOR)

    def add(self, num_output: int) -> None:
        self._recent.append(num_output)
        self._sorted = []

    def _ascending(self) -> list[int]:
        if not self._sorted:
            self._sorted = sorted(self._recent)
        return self._sorted

    @property
    def longest(self) -> int:
        return self._ascending()[-1]

    def remaining(self, seq: "Sequence") -> int:
        """Output tokens still to come: a high quantile of the outputs that were longer than this one is now."""
        produced = seq.num_output
        lengths = self._ascending()
        at = bisect_right(lengths, produced)
        total = lengths[at + int((len(lengths) - at) * QUANTILE)] if at < len(lengths) else 2 * produced
        return max(min(total, seq.end_len - seq.num_prompt) - produced, 0)


def peak_pages(replica: "Replica", newcomer: "Sequence", num_fresh: int, lengths: OutputLengths) -> int:
    """Most pages held at once if newcomer is taken now with num_fresh new pages and everybody ends as expected.

    At the time a sequence ends, those that run longer have grown by its remaining tokens and the shorter ones are gone.
    """
    page_tokens = replica.page_tokens
    own = [(lengths.remaining(seq), len(seq.pages) - seq.num_cached // page_tokens) for seq in replica.running]
    shared = max(replica.pool.held - sum(pages for _, pages in own), 0)
    own.append((lengths.remaining(newcomer), num_fresh))
    own.sort(reverse=True)
    peak = alive_pages = 0
    for count, (remaining, pages) in enumerate(own, start=1):
        alive_pages += pages
        peak = max(peak, alive_pages + count * remaining // page_tokens)
    return shared + peak

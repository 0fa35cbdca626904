"""How much computing waits or is under way, in seconds of one fully loaded replica: the signal that workers scale on.

It does not depend on how many replicas there are, so wanted replicas = work seconds / the seconds that one replica may have.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.cell import Cell

WINDOW_US = 1_000_000  # of device time: one measurement
SMOOTHING = 0.3
FULL = 0.8  # a window with this share of the most rows seen lately counts as fully loaded
FORGET = 0.998  # of the most rows, per window: an hour of lower load halves it many times


class DecodeSpeed:
    """Device time of one decode token when a step carries many rows, learned from finished steps (0: not known yet)."""

    __slots__ = ("_num_steps", "_num_tokens", "_us", "most_rows", "token_us")

    def __init__(self) -> None:
        self.token_us = 0.0
        self.most_rows = 0.0  # rows per step of the fullest window, slowly forgotten
        self._us = self._num_steps = self._num_tokens = 0

    def observe(self, num_prefill_tokens: int, num_decode: int, step_us: int) -> None:
        if num_prefill_tokens or not num_decode:
            return
        self._us += step_us
        self._num_steps += 1
        self._num_tokens += num_decode
        if self._us >= WINDOW_US:
            self._learn(self._num_tokens / self._num_steps, self._us / self._num_tokens)
            self._us = self._num_steps = self._num_tokens = 0

    def _learn(self, rows: float, token_us: float) -> None:
        self.most_rows *= FORGET
        if rows * FULL > self.most_rows:  # much fuller than anything seen
            self.token_us = token_us
        elif rows >= FULL * self.most_rows:
            self.token_us += SMOOTHING * (token_us - self.token_us)
        self.most_rows = max(self.most_rows, rows)


def work_s(cell: "Cell") -> float:
    """Of all sequences, waiting and running; outputs are as long as the cell's recent ones."""
    prefill = sum(len(seq.tokens) for seq in list(cell.waiting))
    output = sum(cell.lengths.remaining(seq) for seq in list(cell.waiting))
    prefill_us = 0.0
    for replica in list(cell.replicas.values()):
        running = list(replica.running)
        prefill += sum(max(seq.prefill_left, 0) for seq in running)
        output += sum(cell.lengths.remaining(seq) for seq in running)
        prefill_us = max(prefill_us, replica.chunk_budget.token_us)
    return (prefill * prefill_us + output * cell.speed.token_us) / 1e6

"""What one gateway is to be told next: the columns of Tokens, filled by commits and plans, emptied by flush."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shared.columns import i32, i64
from shared.messages import PromptScores, Tokens

if TYPE_CHECKING:
    from scheduler.sequence import Sequence

MESSAGE_ROWS = 256  # of one Tokens: a gateway answers others between two, and writes so many chunks in about 5 ms


class Outbox:
    """One gateway: its live sequences and its unsent columns."""

    __slots__ = (
        "finished_ids",
        "finished_reasons",
        "ids",
        "indexes",
        "logprobs",
        "model",
        "name",
        "peer",
        "scores",
        "sequences",
        "started_cached",
        "started_ids",
        "tokens",
        "top_ids",
        "top_logprobs",
        "top_width",
    )

    def __init__(self, peer: str, name: str, model: str) -> None:
        self.peer = peer
        self.name = name
        self.model = model  # fingerprint
        self.sequences: dict[int, Sequence] = {}  # live ones by id
        self.clear()

    def clear(self) -> None:
        self.ids: list[int] = []
        self.indexes: list[int] = []
        self.tokens: list[int] = []
        self.logprobs = b""
        self.top_width = 0
        self.top_ids = b""
        self.top_logprobs = b""
        self.started_ids: list[int] = []
        self.started_cached: list[int] = []
        self.finished_ids: list[int] = []
        self.finished_reasons: list[int] = []
        self.scores: list[PromptScores] = []

    def finish(self, sequence_id: int, reason: int) -> None:
        self.finished_ids.append(sequence_id)
        self.finished_reasons.append(reason)

    def flush(self) -> list[tuple[str, PromptScores | Tokens]]:
        """Messages to send now, scores first; the columns are empty afterwards."""
        out: list[tuple[str, PromptScores | Tokens]] = [(self.peer, scores) for scores in self.scores]
        if self.ids or self.finished_ids or self.started_ids:
            out.extend((self.peer, tokens) for tokens in self._tokens())
        if out:
            self.clear()
        return out

    def _tokens(self) -> Iterator[Tokens]:
        """The columns in pieces: who started comes with the first, who finished with the last."""
        num_rows, width = len(self.ids), self.top_width
        for start in range(0, max(num_rows, 1), MESSAGE_ROWS):
            rows = slice(start, start + MESSAGE_ROWS)
            first, last = start == 0, start + MESSAGE_ROWS >= num_rows
            yield Tokens(
                i64(self.ids[rows]),
                i32(self.indexes[rows]),
                i32(self.tokens[rows]),
                self.logprobs[4 * rows.start : 4 * rows.stop],
                width,
                self.top_ids[4 * width * rows.start : 4 * width * rows.stop],
                self.top_logprobs[4 * width * rows.start : 4 * width * rows.stop],
                i64(self.started_ids if first else []),
                i32(self.started_cached if first else []),
                i64(self.finished_ids if last else []),
                bytes(self.finished_reasons if last else []),
            )

"""What one gateway is to be told next: the columns of one Tokens message, filled by commits and plans, emptied by flush."""

from typing import TYPE_CHECKING

from shared.columns import i32, i64
from shared.messages import PromptScores, Tokens

if TYPE_CHECKING:
    from scheduler.sequence import Sequence


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
        "since",
        "started_cached",
        "started_ids",
        "tokens",
        "top_ids",
        "top_logprobs",
        "top_width",
    )

    def __init__(self, peer: str, name: str, model: str, since: float = 0.0) -> None:
        self.peer = peer
        self.name = name
        self.model = model  # fingerprint
        self.since = since  # clock time of its hello
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
            tokens = Tokens(
                i64(self.ids),
                i32(self.indexes),
                i32(self.tokens),
                self.logprobs,
                self.top_width,
                self.top_ids,
                self.top_logprobs,
                i64(self.started_ids),
                i32(self.started_cached),
                i64(self.finished_ids),
                bytes(self.finished_reasons),
            )
            out.append((self.peer, tokens))
        if out:
            self.clear()
        return out

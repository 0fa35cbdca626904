"""One choice as the client sees it: its text so far, the tokens that made it, and why it ended.

Text, token ids and log-probabilities describe the same tokens: a token is listed when its first character is part of the text.
The token that ended the answer and tokens that lie wholly inside the stop string are not (unless the request includes what
stopped it). Usage counts every generated token, listed or not.
"""

import asyncio
from collections import deque
from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

from gateway.errors import ApiError
from gateway.metrics import Histogram
from gateway.request import ValidRequest
from gateway.sequence import Score, Sequence
from gateway.text_stream import Detokenizer, StopMatcher, StopSet, detokenizer
from gateway.tokenizer import Tokenizer
from shared.messages import Finish, Reject

LONG_GAP_S = 0.25  # between two tokens: worth an exemplar
FINISH_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort"}


class Entry(NamedTuple):
    """One listed token. score: None where none was asked. start: of its first character in the choice's text."""

    token: int
    score: Score | None
    start: int


class Listener(Protocol):
    """Who hears of choices as they grow. Called on the loop, in order."""

    def on_text(self, choice: "Choice", text: str, entries: Items[Entry]) -> None:
        """The choice grew by this text and these listed tokens (either may be empty, not both)."""

    def on_end(self, choice: "Choice") -> None:
        """finish_reason is set; nothing follows for this choice."""


class Owner(Protocol):
    """The run a choice belongs to."""

    begun: asyncio.Event

    def choice_ended(self, choice: "Choice") -> None: ...

    def fail(self, error: ApiError) -> None: ...


class Choice:
    def __init__(
        self,
        index: int,
        sequence: Sequence,
        request: ValidRequest,
        tokenizer: Tokenizer,
        stops: StopSet | None,
        owner: Owner,
        gaps: Histogram,
    ) -> None:
        self.index = index
        self.sequence = sequence
        self._gaps = gaps  # seconds between tokens
        self.finish_reason = ""
        self.stop_reason: int | str | None = None  # the stop string, or the id among stop_token_ids
        self.prompt_scores: list[Score] = []  # of prompt tokens 1, 2, ...
        self.parts: list[str] = []  # text so far, where nobody listens
        self.entries: list[Entry] = []  # listed tokens so far, where nobody listens
        self.first_at = 0.0  # loop time of the first token
        self.last_at = 0.0
        self._request = request
        self._tokenizer = tokenizer
        self._owner = owner
        self._listener: Listener
        self._detokenizer: Detokenizer = detokenizer(tokenizer, sequence.prompt.ids, request.skip_special_tokens)
        self._matcher = StopMatcher(stops) if stops else None
        self._stop_ids = sequence.recipe.stop_ids
        self._min_new = request.min_tokens
        self._end: tuple[int, Score | None] | None = None  # the stop id that ended the sequence
        self._detailed = request.logprobs >= 0 or request.return_token_ids
        self._plain = not (self._detailed or stops or request.echo)
        self._produced = 0  # characters of the answer found so far ...
        self._released = 0  # ... and handed to the listener
        self._waiting: deque[Entry] = deque()  # tokens not listed yet
        self._stopped = False  # a stop string ended it

    def start(self, listener: Listener) -> None:
        self._listener = listener

    def let_go(self) -> None:
        """Nothing is called any more. It is freed by its references: thousands of requests end between two collections."""
        self.sequence.sink = None  # type: ignore[assignment]  # nobody holds the sequence but us
        del self._owner, self._listener

    @property
    def num_tokens(self) -> int:
        return len(self.sequence.output)

    @property
    def text(self) -> str:
        """Where nobody listens: the text so far."""
        return "".join(self.parts)

    @property
    def token_ids(self) -> list[int]:
        """Ids of the listed tokens so far, where nobody listens and the request returns ids or log-probabilities."""
        return [entry.token for entry in self.entries]

    # --- the sequence's sink

    def on_token(self, token: int, score: Score | None, now: float) -> None:
        if self.last_at:
            gap_s = now - self.last_at
            self._gaps.observe(gap_s)
            if gap_s > LONG_GAP_S:
                self._gaps.exemplify(gap_s, self.sequence.recipe.labels)
        else:
            self.first_at = now
        self.last_at = now
        self._take(token, score)

    def retell(self, token: int) -> None:
        """A token that came before this process had the choice."""
        self.sequence.output.append(token)
        self._take(token, None)

    def _take(self, token: int, score: Score | None) -> None:
        if len(self.sequence.output) == 1:
            self._owner.begun.set()
            if self._request.echo:
                self._echo()
        if token in self._stop_ids and len(self.sequence.output) > self._min_new:
            self._end = (token, score)
            return
        text = self._detokenizer.push(token)
        if self._plain:
            if text:
                self._listener.on_text(self, text, ())
        else:
            self._push(token, score, text)
            if self._stopped:
                self._ended()

    def on_scores(self, scores: list[Score]) -> None:
        self.prompt_scores += scores

    def on_finish(self, reason: int) -> None:
        if reason == Finish.ERROR:
            self._owner.fail(ApiError(500, "The model could not compute this answer", code="computation_failed"))
            return
        if reason == Finish.DEADLINE:
            self._owner.fail(ApiError(504, "The deadline of this request passed", code="deadline_exceeded"))
            return
        if self._request.echo and not self.sequence.output:
            self._echo()
        self.finish_reason = FINISH_REASONS.get(reason, "abort")
        if self._end is not None:
            self.finish_reason = "stop"
            token, score = self._end
            if token in self._request.stop_token_ids:
                self.stop_reason = token
            if self._request.include_stop:
                self._push(token, score, self._detokenizer.push(token))
        if not self._stopped:
            self._flush()
        self._ended()

    def on_reject(self, reject: Reject) -> None:
        self._owner.fail(
            ApiError(
                reject.status if 400 <= reject.status < 600 else 500,
                reject.text,
                code=reject.code,
                param=reject.param,
                retry_after_s=reject.retry_after_s,
            )
        )

    def on_failure(self, text: str) -> None:
        self._owner.fail(ApiError(500, text, code="internal_error"))

    # --- text

    def _push(self, token: int, score: Score | None, text: str) -> None:
        if self._detailed:
            self._waiting.append(Entry(token, score, self._produced))
        self._produced += len(text)
        if self._matcher is None or len(self.sequence.output) <= self._min_new:
            self._release(text)
            return
        released, found = self._matcher.push(text)
        if found:
            self._stop(released, found)
        else:
            self._release(released)

    def _stop(self, released: str, found: str) -> None:
        """A stop string is complete: the choice ends here, whatever the scheduler still computes."""
        self._release(released + found if self._request.include_stop else released)
        self._waiting.clear()
        self.finish_reason = "stop"
        self.stop_reason = found
        self._stopped = True

    def _flush(self) -> None:
        """Everything that waited for more is text now."""
        tail = self._detokenizer.flush()
        self._produced += len(tail)
        if self._matcher is not None:
            released, found = self._matcher.push(tail)
            if found:
                self._stop(released, found)
                return
            tail = released + self._matcher.flush()
        self._release(tail)
        if self._waiting:
            entries = list(self._waiting)
            self._waiting.clear()
            self._listener.on_text(self, "", entries)

    def _release(self, text: str) -> None:
        self._released += len(text)
        entries: list[Entry] = []
        while self._waiting and self._waiting[0].start < self._released:
            entries.append(self._waiting.popleft())
        if text or entries:
            self._listener.on_text(self, text, entries)

    def _echo(self) -> None:
        """The prompt is the beginning of the text; its tokens are listed where log-probabilities are."""
        prompt = self.sequence.prompt
        if prompt.echo is None:
            prompt.echo = self._read_prompt()
        text, starts = prompt.echo
        entries: list[Entry] = []
        if starts:
            nothing = Score(None, [])
            scores = [nothing, *self.prompt_scores]
            scores += [nothing] * (len(prompt.ids) - len(scores))
            entries = [Entry(*each) for each in zip(prompt.ids, scores, starts, strict=False)]
        self._produced = self._released = len(text)
        if text or entries:
            self._listener.on_text(self, text, entries)

    def _read_prompt(self) -> tuple[str, list[int]]:
        """The prompt's text and, where its tokens are listed, the position of each in it."""
        prompt, skip = self.sequence.prompt, self._request.skip_special_tokens
        starts: list[int] = []
        if self._request.logprobs >= 0:
            reader, start = detokenizer(self._tokenizer, (), skip), 0
            for token in prompt.ids:
                starts.append(start)
                start += len(reader.push(token))
        return self._tokenizer.decode(prompt.ids, skip) if prompt.text is None else prompt.text, starts

    def _ended(self) -> None:
        self._listener.on_end(self)
        self._owner.choice_ended(self)

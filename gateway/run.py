"""One request under way: its choices, the text they collect, how it ends, and what it used."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from gateway.choice import Choice, Entry, Listener
from gateway.errors import ApiError
from gateway.request import ValidRequest
from gateway.sequence import Prompt, Recipe, Sequence
from gateway.text_stream import StopSet
from shared.messages import Finish

if TYPE_CHECKING:
    from gateway.session import Session

REASONS = {"stop": Finish.STOP, "length": Finish.LENGTH}
RETOLD_AT_ONCE = 64  # tokens between which others have their turn
DEADLINE_GRACE_S = 1.0  # that the scheduler's own answer to a passed deadline may take


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be submitted: its prompts as ids, each with room for its output."""

    request: ValidRequest
    prompts: list[Prompt]
    max_new: list[int]  # per prompt
    recipe: Recipe
    tickets: list[bytes] = field(default_factory=list)  # per prompt, of a stream that can be taken over
    known: "list[Known]" = field(default_factory=list)  # per choice, of a stream that was


class Known(NamedTuple):
    """What a choice that was taken over has been told already."""

    output: "array[int]"
    reason: int  # Finish, or 0: it has not ended
    cached: int  # prompt tokens in the cache at its first start; -1: it had none


class Delta(NamedTuple):
    """What one choice grew by. When the choice ended, text and entries are empty and its finish_reason is set."""

    choice: "Choice"
    text: str
    entries: Items[Entry]


class Usage(NamedTuple):
    prompt_tokens: int  # each prompt once, however many choices
    completion_tokens: int
    cached_tokens: int  # prompt tokens that were in the cache before this request


class _Collector:
    """Keeps the text of every choice in the choice; where the request is a stream, deltas go to whoever iterates, too."""

    def __init__(self, stream: bool) -> None:
        self.deltas: asyncio.Queue[Delta | None] | None = asyncio.Queue() if stream else None

    def on_text(self, choice: Choice, text: str, entries: Items[Entry]) -> None:
        choice.parts.append(text)
        choice.entries += entries
        if self.deltas is not None:
            self.deltas.put_nowait(Delta(choice, text, entries))

    def on_end(self, choice: Choice) -> None:
        if self.deltas is not None:
            self.deltas.put_nowait(Delta(choice, "", ()))


class Run:
    """One request under way: an async context manager that ends everything it started."""

    def __init__(self, session: "Session", prepared: Prepared, listener: Listener | None) -> None:
        request, self.prompts = prepared.request, prepared.prompts
        self.request = request
        self.failure: ApiError | None = None
        self.begun = asyncio.Event()  # a first token, an end or a failure is there
        self.done = asyncio.Event()
        self.num_retold = 0  # tokens that were there before this run
        self._timer: asyncio.TimerHandle | None = None
        self._session = session
        self._recipe = prepared.recipe
        self._known = prepared.known
        self._retelling = False  # what happens now has been counted before
        self._collector = _Collector(request.stream) if listener is None else None
        self._listener: Listener = listener or self._collector  # type: ignore[assignment]  # one of them is there
        stops = StopSet(request.stop) if request.stop else None
        self.choices: list[Choice] = []
        tickets = prepared.tickets or [b""] * len(prepared.prompts)
        for number, prompt in enumerate(prepared.prompts):
            for choice in range(request.n):
                index = number * request.n + choice
                sequence = Sequence(prompt, prepared.recipe, choice, prepared.max_new[number], sink=None)  # type: ignore[arg-type]
                sequence.index, sequence.ticket = index, tickets[number]
                tokenizer, gaps = session.model.tokenizer, session.metrics.token_gap
                sequence.sink = Choice(index, sequence, request, tokenizer, stops, self, gaps)
                self.choices.append(sequence.sink)
        self._num_open = len(self.choices)

    async def __aenter__(self) -> "Run":
        for choice in self.choices:
            choice.start(self._listener)
        self._session.remember(self)
        if self._recipe.deadline_s:  # the scheduler's to notice, unless there is none
            loop = asyncio.get_running_loop()
            late = ApiError(504, "The deadline of this request passed", code="deadline_exceeded")
            self._timer = loop.call_at(self._recipe.arrived + self._recipe.deadline_s + DEADLINE_GRACE_S, self.fail, late)
        if not self._known:
            self._submit()
        return self

    def _submit(self) -> None:
        for choice in self.choices:
            if not choice.finish_reason and self.failure is None:
                self._session.service.submit(choice.sequence)

    async def retell(self, pause: Callable[[], Awaitable[None]]) -> None:
        """Begin where a stream that was taken over has come to; pause is awaited every RETOLD_AT_ONCE tokens."""
        self._retelling = True
        for choice, known in zip(self.choices, self._known, strict=False):
            sequence = choice.sequence
            sequence.cached = known.cached
            if known.output:
                sequence.num_scored = len(sequence.prompt.ids)
            for number, token in enumerate(known.output):
                if number % RETOLD_AT_ONCE == 0:
                    await pause()
                if choice.finish_reason or self.done.is_set():
                    break
                choice.retell(token)
            if known.reason and not choice.finish_reason and not self.done.is_set():
                choice.on_finish(known.reason)
        self._retelling = False
        self.num_retold = sum(choice.num_tokens for choice in self.choices)
        self._submit()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.forget(self)
        if self._timer is not None:
            self._timer.cancel()
        metrics = self._session.metrics
        if self._recipe.stream and self.failure is None:
            self._session.service.keep([choice.sequence for choice in self.choices])
        if not self.done.is_set():
            metrics.aborted += 1
            self.failure = ApiError(499, "The client left", code="aborted")
            self._drop_all()
        for choice in self.choices:
            choice.let_go()
        del self._listener
        if self._known:  # counted by whoever had it first
            return
        usage = self.usage
        metrics.prompt_tokens += usage.prompt_tokens
        metrics.cached_tokens += usage.cached_tokens
        metrics.tenant_tokens[self._recipe.tenant, "prompt"] += usage.prompt_tokens
        metrics.tenant_tokens[self._recipe.tenant, "generated"] += usage.completion_tokens
        first = [choice.first_at for choice in self.choices if choice.first_at]
        if first:
            last, labels = max(choice.last_at for choice in self.choices), self._recipe.labels
            for histogram, at in ((metrics.first_token, min(first)), (metrics.end_to_end, last)):
                histogram.observe(at - self._recipe.arrived)
                histogram.exemplify(at - self._recipe.arrived, labels)

    def choice_ended(self, choice: Choice) -> None:
        self._session.service.drop(choice.sequence, stopped=choice.finish_reason == "stop")
        choice.sequence.reason = REASONS.get(choice.finish_reason, 0)
        if not self._retelling:
            self._session.metrics.finished[choice.finish_reason] += 1
        self._num_open -= 1
        if not self._num_open:
            self._set_done()

    def fail(self, error: ApiError) -> None:
        """One choice cannot be had: the request as a whole fails."""
        if self.done.is_set():
            return
        self.failure = error
        self._session.metrics.finished["error"] += 1
        self._drop_all()
        self._set_done()

    def _drop_all(self) -> None:
        for choice in self.choices:
            self._session.service.drop(choice.sequence)

    def _set_done(self) -> None:
        self.begun.set()
        self.done.set()
        if self._collector is not None and self._collector.deltas is not None:
            self._collector.deltas.put_nowait(None)

    async def wait(self) -> None:
        """Until every choice ended; ApiError if the request failed."""
        await self.done.wait()
        if self.failure is not None:
            raise self.failure

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Deltas of all choices in order of arrival, for requests with stream = True; ApiError if the request fails."""
        if self._collector is None or self._collector.deltas is None:
            raise TypeError("only a request with stream = True that was opened without a listener can be iterated")
        while (delta := await self._collector.deltas.get()) is not None:
            yield delta
        if self.failure is not None:
            raise self.failure

    @property
    def usage(self) -> Usage:
        n = self.request.n
        cached = 0
        for first in range(0, len(self.choices), n):
            cached += max(0, min(choice.sequence.cached for choice in self.choices[first : first + n]))
        return Usage(
            prompt_tokens=sum(len(prompt.ids) for prompt in self.prompts),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=cached,
        )

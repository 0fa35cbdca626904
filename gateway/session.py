"""Requests in, text and tokens out: the seam between whoever asks (HTTP, the Python API) and the scheduler. Needs no HTTP.

    session = Session(config, model)              # inside a running event loop
    async with session:                           # keeps a link to the scheduler
        await session.wait_ready(timeout_s=60)
        prepared = await session.prepare(request) # a ValidRequest: chat template, token ids, lengths checked
        async with session.open(prepared) as run: # submits; leaving the block for any reason aborts what still runs, once
            async for delta in run: ...           # Delta(choice, text, entries); or `await run.wait()` and read the choices
            for choice in run.choices: choice.text, choice.token_ids, choice.finish_reason, choice.num_tokens

Iterating needs request.stream; choice.token_ids needs request.return_token_ids (choice.sequence.output has all ids anyway).
ApiError (gateway.errors) is raised by prepare, by the iteration and by wait. A listener given to open() is called for every
piece of text instead of collecting: that is how HTTP writes a stream without waking a task for each token.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from gateway.chat_template import ChatTemplate
from gateway.choice import Choice, Entry, Listener
from gateway.errors import ApiError, BadRequest, Unavailable
from gateway.limits import Limits
from gateway.metrics import Metrics
from gateway.openai import random_seed
from gateway.request import ValidRequest
from gateway.sequence import Prompt, Recipe, Sequence
from gateway.served_model import ServedModel
from gateway.service import Service
from gateway.text_stream import StopSet
from shared import pages
from shared.config import Config

DEADLINE_GRACE_S = 1.0  # that the scheduler's own answer to a passed deadline may take
HASH_INLINE_IDS = 4096  # longer prompts are hashed in a thread


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be submitted: its prompts as ids, each with room for its output."""

    request: ValidRequest
    prompts: list[Prompt]
    max_new: list[int]  # per prompt
    recipe: Recipe


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
        self._timer: asyncio.TimerHandle | None = None
        self._session = session
        self._recipe = prepared.recipe
        self._collector = _Collector(request.stream) if listener is None else None
        self._listener: Listener = listener or self._collector  # type: ignore[assignment]  # one of them is there
        stops = StopSet(request.stop) if request.stop else None
        self.choices: list[Choice] = []
        for number, prompt in enumerate(prepared.prompts):
            for choice in range(request.n):
                index = number * request.n + choice
                sequence = Sequence(prompt, prepared.recipe, choice, prepared.max_new[number], sink=None)  # type: ignore[arg-type]
                tokenizer, gaps = session.model.tokenizer, session.metrics.token_gap
                sequence.sink = Choice(index, sequence, request, tokenizer, stops, self, gaps)
                self.choices.append(sequence.sink)
        self._num_open = len(self.choices)

    async def __aenter__(self) -> "Run":
        self._session.remember(self)
        if self._recipe.deadline_s:  # the scheduler's to notice, unless there is none
            loop = asyncio.get_running_loop()
            late = ApiError(504, "The deadline of this request passed", code="deadline_exceeded")
            self._timer = loop.call_at(self._recipe.arrived + self._recipe.deadline_s + DEADLINE_GRACE_S, self.fail, late)
        for choice in self.choices:
            choice.start(self._listener)
            self._session.service.submit(choice.sequence)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.forget(self)
        if self._timer is not None:
            self._timer.cancel()
        metrics = self._session.metrics
        if not self.done.is_set():
            metrics.aborted += 1
            self.failure = ApiError(499, "The client left", code="aborted")
            self._drop_all()
        usage = self.usage
        metrics.prompt_tokens += usage.prompt_tokens
        metrics.cached_tokens += usage.cached_tokens
        first = [choice.first_at for choice in self.choices if choice.first_at]
        if first:
            metrics.first_token.observe(min(first) - self._recipe.arrived)
            metrics.end_to_end.observe(max(choice.last_at for choice in self.choices) - self._recipe.arrived)

    def choice_ended(self, choice: Choice) -> None:
        self._session.service.drop(choice.sequence)
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


class Session:
    """All requests of this process and their one link to the scheduler."""

    def __init__(self, config: Config, model: ServedModel, metrics: Metrics | None = None) -> None:
        """Inside a running event loop. Nothing is connected before the context is entered."""
        self.model = model
        self.limits: Limits = model.limits
        self.metrics = metrics or Metrics()
        self.service = Service(config, model.fingerprint, self.metrics)
        self.runs: set[Run] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = ""  # why nothing new is taken; empty: it is
        self._loop = asyncio.get_running_loop()
        self._template: ChatTemplate | None = None
        if model.template_source:
            self._template = ChatTemplate(
                model.template_source,
                model.template_special,
                timeout_s=config.template_timeout_s,
                max_chars=self.limits.max_rendered_chars,
            )
        self._link: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Session":
        if self._template is not None:
            await self._template.start()
        self._link = asyncio.create_task(self.service.run(), name="scheduler link")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._link is not None:
            self._link.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._link
        if self._template is not None:
            await self._template.close()
        self.model.tokenizer.close()

    def stop(self) -> None:
        """End every request under way with an error."""
        for run in list(self.runs):
            run.fail(Unavailable("The server stops", code="server_stopped"))

    # --- readiness

    def check_available(self) -> None:
        """Unavailable unless a new request can be computed now."""
        if self.draining:
            raise Unavailable(self.draining, 5, "draining")
        if (reason := self.service.unavailable()) is not None:
            raise reason

    async def wait_ready(self, timeout_s: float) -> None:
        """Until requests can be computed; Unavailable with the reason when that takes longer."""
        until = self._loop.time() + timeout_s
        while True:
            try:
                return self.check_available()
            except Unavailable:
                if self._loop.time() > until:
                    raise
            await asyncio.sleep(0.02)

    async def wait_idle(self) -> None:
        """Until no request is under way."""
        await self._idle.wait()

    def remember(self, run: Run) -> None:
        self.runs.add(run)
        self._idle.clear()

    def forget(self, run: Run) -> None:
        self.runs.discard(run)
        if not self.runs:
            self._idle.set()

    # --- requests

    async def prepare(self, request: ValidRequest) -> Prepared:
        """Turn a request into token ids and check their lengths; BadRequest or Unavailable."""
        self.check_available()
        arrived = self._loop.time()
        sources = await self._sources(request)
        prompts = [await self._prompt(request, source, alone=len(sources) == 1) for source in sources]
        total = sum(len(prompt.ids) for prompt in prompts) * request.n
        if total > self.limits.max_prompt_ids:
            text = f"The prompts times n = {request.n} have {total} tokens, limit {self.limits.max_prompt_ids}"
            raise BadRequest(text, "n", "too_many_items")
        seed = random_seed() if request.seed is None else request.seed
        recipe = Recipe.of(request, self.model.eos_ids, seed, arrived)
        max_new = [self._room(request, len(prompt.ids)) for prompt in prompts]
        self._check_logprobs(request, prompts, max_new)
        return Prepared(request, prompts, max_new, recipe)

    def _check_logprobs(self, request: ValidRequest, prompts: list[Prompt], max_new: list[int]) -> None:
        """A whole answer is kept until its end: its log-probabilities must fit."""
        if request.stream:
            return
        entries = sum(max_new) * (request.logprobs + 1)
        entries += sum(len(prompt.ids) for prompt in prompts) * (request.score_width + 1)
        if entries * request.n > self.limits.max_logprob_entries:
            text = f"n = {request.n} answers would hold up to {entries * request.n} log-probabilities, limit "
            text += f"{self.limits.max_logprob_entries}: ask for fewer tokens, choices or alternatives, or stream"
            raise BadRequest(text, "logprobs", "too_many_items")

    async def _sources(self, request: ValidRequest) -> list[str | list[int]]:
        if request.messages is None:
            return request.prompts or []
        if self._template is None:
            raise BadRequest("This model has no chat template", "messages", "no_chat_template")
        return [await self.render(request)]

    async def render(self, request: ValidRequest) -> str:
        """The prompt text of a chat request."""
        assert self._template is not None and request.messages is not None
        return await self._template.render(request.messages, request.add_generation_prompt, request.template_arguments)

    async def encode(self, request: ValidRequest, source: str | list[int], alone: bool = True) -> list[int]:
        """Ids of one prompt (alone: of one); one that has none starts from the model's BOS token."""
        if isinstance(source, list):
            return source
        tokenizer, field = self.model.tokenizer, "messages" if request.messages is not None else "prompt"
        fewest = tokenizer.fewest_tokens(source)
        if not request.truncate_prompt_tokens and 0 < self.service.max_len < fewest:
            raise _too_long(self.service.max_len, f"the prompt has at least {fewest} tokens", field)
        ids = await tokenizer.encode_async(source, request.add_special_tokens, alone)
        if ids:
            return ids
        if tokenizer.bos_id is None:
            raise BadRequest("The prompt is empty, and this model has no token to begin with", field, "empty_prompt")
        return [tokenizer.bos_id]

    async def _prompt(self, request: ValidRequest, source: str | list[int], *, alone: bool) -> Prompt:
        ids = await self.encode(request, source, alone)
        text = source if isinstance(source, str) else None
        keep = request.truncate_prompt_tokens
        if keep < 0:
            keep = max(1, self.service.max_len - (1 if request.max_tokens is None else request.max_tokens))
        if 0 < keep < len(ids):
            ids, text = ids[-keep:], None
        prompt = Prompt(ids, text)
        welcome = self.service.welcome
        if len(ids) > HASH_INLINE_IDS and welcome is not None:
            await asyncio.to_thread(prompt.hashes, welcome, pages.root_hash(welcome.hash_key, ""))
        return prompt

    def _room(self, request: ValidRequest, num_prompt: int) -> int:
        """Output tokens of one prompt. A cap that was asked for is kept or refused, never lowered in silence."""
        limit = self.service.max_len
        if not limit:
            raise Unavailable("The scheduler went away", 2, "scheduler_unavailable")
        field = "messages" if request.messages is not None else "prompt"
        wanted = request.max_tokens
        if wanted is not None:
            if num_prompt + wanted > limit:
                text = f"the prompt has {num_prompt} tokens and max_tokens is {wanted}: {num_prompt} + {wanted} = "
                raise _too_long(limit, f"{text}{num_prompt + wanted} > {limit}", field)
            return wanted
        room = limit - num_prompt
        if room < max(1, request.min_tokens):
            least = f"at least {max(1, request.min_tokens)} for the answer"
            raise _too_long(limit, f"the prompt has {num_prompt} tokens, and {least} are needed", field)
        return min(room, request.default_max_tokens) if request.default_max_tokens else room

    def open(self, prepared: Prepared, listener: Listener | None = None) -> Run:
        """async with session.open(prepared) as run: submits every choice; leaving aborts what still runs, once."""
        return Run(self, prepared, listener)


def _too_long(limit: int, why: str, field: str) -> BadRequest:
    text = f"This model's maximum context length is {limit} tokens, but {why}."
    return BadRequest(text, field, "context_length_exceeded")

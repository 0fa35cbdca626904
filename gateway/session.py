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
from types import TracebackType

from gateway.bad_words import banned_sequences
from gateway.chat_template import ChatTemplate
from gateway.choice import Listener
from gateway.errors import BadRequest, Unavailable
from gateway.limits import Limits
from gateway.metrics import Metrics
from gateway.openai import random_seed
from gateway.request import ValidRequest
from gateway.run import Delta, Prepared, Run, Usage
from gateway.sequence import Prompt, Recipe
from gateway.served_model import ServedModel
from gateway.service import Service
from shared import pages
from shared.config import Config

__all__ = ["Delta", "Prepared", "Run", "Session", "Usage"]

HASH_INLINE_IDS = 16384  # longer prompts are hashed in a thread: they would hold up others for more than 2 ms


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

    async def prepare(self, request: ValidRequest, tenant: str = "", salt: str = "", weight: int = 1) -> Prepared:
        """Turn a request into token ids and check their lengths; BadRequest or Unavailable. salt: of the prefix cache."""
        self.check_available()
        arrived = self._loop.time()
        sources = await self._sources(request)
        prompts = [await self._prompt(request, source, salt, alone=len(sources) == 1) for source in sources]
        total = sum(len(prompt.ids) for prompt in prompts) * request.n
        if total > self.limits.max_prompt_ids:
            text = f"The prompts times n = {request.n} have {total} tokens, limit {self.limits.max_prompt_ids}"
            raise BadRequest(text, "n", "too_many_items")
        seed = random_seed() if request.seed is None else request.seed
        recipe = self.recipe(request, seed, self._loop.time() - arrived, tenant, salt, weight)
        max_new = [self._room(request, len(prompt.ids)) for prompt in prompts]
        self._check_logprobs(request, prompts, max_new)
        return Prepared(request, prompts, max_new, recipe)

    def recipe(self, request: ValidRequest, seed: int, age_s: float, tenant: str, salt: str, weight: int) -> Recipe:
        """How every sequence of a request that arrived so long ago is computed."""
        banned = banned_sequences(request, self.model.tokenizer, self.limits.vocab_size)
        return Recipe.of(request, self.model.eos_ids, seed, self._loop.time() - age_s, tenant, salt, weight, banned)

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
        if request.continue_final_message:
            return await self._template.continued(request.messages, request.template_arguments)
        return await self._template.render(request.messages, request.add_generation_prompt, request.template_arguments)

    async def encode(self, request: ValidRequest, source: str | list[int], alone: bool = True) -> list[int]:
        """Ids of one prompt (alone: of one); one that has none starts from the model's BOS token."""
        if isinstance(source, list):
            return source
        tokenizer, field = self.model.tokenizer, request.prompt_field
        fewest = tokenizer.fewest_tokens(source)
        if not request.truncate_prompt_tokens and 0 < self.service.max_len < fewest:
            raise _too_long(self.service.max_len, f"the prompt has at least {fewest} tokens", field)
        ids = await tokenizer.encode_async(source, request.add_special_tokens, alone)
        if ids:
            return ids
        if tokenizer.bos_id is None:
            raise BadRequest("The prompt is empty, and this model has no token to begin with", field, "empty_prompt")
        return [tokenizer.bos_id]

    async def _prompt(self, request: ValidRequest, source: str | list[int], salt: str, *, alone: bool) -> Prompt:
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
            await asyncio.to_thread(prompt.hashes, welcome, pages.root_hash(welcome.hash_key, salt))
        return prompt

    def _room(self, request: ValidRequest, num_prompt: int) -> int:
        """Output tokens of one prompt. A cap that was asked for is kept or refused, never lowered in silence."""
        limit = self.service.max_len
        if not limit:
            raise Unavailable("The scheduler went away", 2, "scheduler_unavailable")
        field = request.prompt_field
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

"""LLM: prompts in, texts out, without asyncio. An AsyncEngine on a loop in a thread of its own."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from quire.engine import AsyncEngine, Messages, Prompt
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams

T = TypeVar("T")
AT_ONCE = 1024  # requests under way; more wait here

ManyParams = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """Loads the model when it is made; close() or the end of a with block ends its processes, as the end of this one does."""

    def __init__(self, model: str = "", **options: Any) -> None:
        """Settings are those of `quire serve`, with underscores: LLM("org/name", max_model_len=4096)."""
        self._engine = AsyncEngine(model, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire", daemon=True)
        self._thread.start()
        try:
            self._run(self._engine.__aenter__())
        except BaseException:
            self._end_loop()
            raise

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: ManyParams = None, use_tqdm: bool = False
    ) -> list[RequestOutput]:
        """One output per prompt, in order. ValueError names what is wrong with a request."""
        many = [prompts] if _is_one(prompts) else list(prompts)
        return self._all(self._engine.complete, many, sampling_params, use_tqdm)

    def chat(
        self, messages: Messages | Sequence[Messages], sampling_params: ManyParams = None, use_tqdm: bool = False
    ) -> list[RequestOutput]:
        """One output per conversation, in order."""
        many = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        return self._all(self._engine.complete_chat, many, sampling_params, use_tqdm)

    def close(self) -> None:
        if self._thread.is_alive():
            self._run(self._engine.close())
            self._end_loop()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _all(
        self, ask: Callable[[Any, SamplingParams | None], Awaitable[T]], many: Sequence[Any], params: ManyParams, use_tqdm: bool
    ) -> list[T]:
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise ValueError(f"{len(many)} prompts, but {len(each)} sampling_params")
        return self._run(_gather(ask, list(zip(many, each, strict=True)), use_tqdm))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C: what runs is ended too
            future.cancel()
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _is_one(prompts: Any) -> bool:
    """Whether this is one prompt: a text, an object, or token ids."""
    return isinstance(prompts, str | Mapping) or bool(prompts and isinstance(prompts[0], int))


async def _gather(
    ask: Callable[[Any, SamplingParams | None], Awaitable[T]], work: list[tuple[Any, SamplingParams | None]], use_tqdm: bool
) -> list[T]:
    """All answers. The first failure ends the others."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    room = asyncio.Semaphore(AT_ONCE)
    with tqdm(total=len(work), disable=not use_tqdm, unit="prompt") as bar:

        async def one(prompt: Any, params: SamplingParams | None) -> T:
            async with room:
                answer = await ask(prompt, params)
            bar.update()
            return answer

        tasks = [asyncio.ensure_future(one(prompt, params)) for prompt, params in work]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

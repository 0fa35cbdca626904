"""AsyncEngine: a model on this machine, asked from Python. Scheduler and workers are child processes; there is no HTTP."""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gateway import openai, served_model
from gateway.errors import ApiError
from gateway.request import ValidRequest
from gateway.session import Session
from quire import roles
from quire.outputs import RequestOutput, request_output
from quire.sampling_params import SamplingParams
from quire.supervisor import Supervisor
from shared import config as settings
from shared import model_folder
from shared.config import Config

log = logging.getLogger("quire.engine")

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, {"prompt": text} or {"prompt_token_ids": ids}
Messages = Sequence[Mapping[str, Any]]


class AsyncEngine:
    """Used as an async context manager. Settings are those of `quire serve`, with underscores: max_model_len=4096."""

    def __init__(self, model: str = "", *, start_timeout_s: float = 1800.0, **options: Any) -> None:
        """BadConfig or ModelError when the model cannot be served; a GGUF file is converted here, at its first use."""
        config = settings.from_sources({"log_level": "warning", "model": model, **_known(options)}, {})
        self.config, folder = roles.prepare(config)
        self._folder: Path = folder
        self._start_timeout_s = start_timeout_s
        self._numbers = itertools.count(1)
        self._supervisor: Supervisor | None = None
        self._session: Session | None = None

    async def __aenter__(self) -> "AsyncEngine":
        """RuntimeError when a process cannot be started, with its own words."""
        self._supervisor = Supervisor(roles.make_roles(self.config, gateway=False), say=log.warning)
        try:
            model = served_model.load(self._folder, self.config.served_model_name, model_folder.fingerprint(self._folder))
            self._session = await Session(self.config, model).__aenter__()
            await self._wait_ready(self._session, self._supervisor)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all requests and processes."""
        session, self._session = self._session, None
        supervisor, self._supervisor = self._supervisor, None
        try:
            if session is not None:
                await session.__aexit__(None, None, None)
        finally:
            if supervisor is not None:
                await supervisor.close()

    async def _wait_ready(self, session: Session, supervisor: Supervisor) -> None:
        waiting = asyncio.create_task(session.wait_ready(self._start_timeout_s))
        futures: list[asyncio.Future[Any]] = [waiting, supervisor.failed]
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if supervisor.failed.done():
                raise RuntimeError(supervisor.failed.result())
            waiting.result()
            supervisor.mark_ready()
        finally:
            waiting.cancel()

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt: all that is there so far, each time it grew. Closing the generator ends the work."""
        return self._stream(self._completion(prompt, sampling_params, stream=True), request_id)

    def chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, request_id: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation; otherwise as generate."""
        return self._stream(self._chat(messages, sampling_params, stream=True), request_id)

    async def complete(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Continue a prompt to its end."""
        return await self._whole(self._completion(prompt, sampling_params, stream=False))

    async def complete_chat(self, messages: Messages, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation to its end."""
        return await self._whole(self._chat(messages, sampling_params, stream=False))

    def _running(self) -> Session:
        if self._session is None:
            raise RuntimeError("the engine is not running: use it as `async with AsyncEngine(...) as engine`")
        return self._session

    def _completion(self, prompt: Prompt, sampling_params: SamplingParams | None, *, stream: bool) -> ValidRequest:
        body = {"prompt": _content(prompt), "stream": stream, "return_token_ids": True}
        return _parsed(openai.parse_completion, body | _sampling(sampling_params, chat=False), self._running())

    def _chat(self, messages: Messages, sampling_params: SamplingParams | None, *, stream: bool) -> ValidRequest:
        body = {"messages": [dict(each) for each in messages], "stream": stream, "return_token_ids": True}
        return _parsed(openai.parse_chat, body | _sampling(sampling_params, chat=True), self._running())

    async def _stream(self, request: ValidRequest, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        session, name = self._running(), request_id or str(next(self._numbers))
        try:
            async with session.open(await session.prepare(request)) as run:
                async for _ in run:
                    yield request_output(run, session.model.tokenizer, name)
        except ApiError as error:
            raise _as_python(error) from None

    async def _whole(self, request: ValidRequest) -> RequestOutput:
        session, name = self._running(), str(next(self._numbers))
        try:
            async with session.open(await session.prepare(request)) as run:
                await run.wait()
                return request_output(run, session.model.tokenizer, name)
        except ApiError as error:
            raise _as_python(error) from None


def _known(options: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in options:
        if name not in Config.__dataclass_fields__:
            raise TypeError(f"{name!r} is no setting; see `quire serve --help`")
    return options


def _content(prompt: Prompt) -> Any:
    if isinstance(prompt, Mapping):
        return list(prompt["prompt_token_ids"]) if "prompt_token_ids" in prompt else prompt["prompt"]
    return prompt if isinstance(prompt, str) else list(prompt)


def _sampling(sampling_params: SamplingParams | None, *, chat: bool) -> dict[str, Any]:
    return sampling_params.body(chat=chat) if sampling_params is not None else {}


def _parsed(parse: Any, body: dict[str, Any], session: Session) -> ValidRequest:
    try:
        request: ValidRequest = parse(body, session.limits)
    except ApiError as error:
        raise _as_python(error) from None
    return request


def _as_python(error: ApiError) -> Exception:
    """A refused request is a ValueError that names its field; anything else a RuntimeError."""
    text = f"{error.param}: {error.text}" if error.param else error.text
    return ValueError(text) if 400 <= error.status < 429 else RuntimeError(text)

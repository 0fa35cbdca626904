"""A gateway over a stub scheduler in one process, and what every test of it checks afterwards."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from gateway import served_model
from gateway.app import create_app, make_runner
from gateway.bodies import Bodies
from gateway.handlers import BODIES
from gateway.served_model import ServedModel
from gateway.session import Session
from shared.config import Config
from shared.tracing import Tracer
from tests.integration.stub_scheduler import Play, StubScheduler


@dataclass
class Answer:
    """One HTTP answer. events: the data of a stream, [DONE] included."""

    status: int
    headers: Any
    body: Any = None
    events: list[Any] = field(default_factory=list)

    def text(self, index: int = 0) -> str:
        """Text of one choice, joined where it came as a stream."""
        if self.events:
            parts = []
            for event in self.events[:-1]:
                for choice in event["choices"]:
                    if choice["index"] == index:
                        parts.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
            return "".join(parts)
        choice = self.body["choices"][index]
        text: str = choice["text"] if "text" in choice else choice["message"]["content"]
        return text

    def choice(self, index: int = 0) -> dict[str, Any]:
        """The choice (of a stream: its last chunk)."""
        if self.events:
            chunks = [each for event in self.events[:-1] for each in event["choices"] if each["index"] == index]
            last: dict[str, Any] = chunks[-1]
            return last
        found: dict[str, Any] = self.body["choices"][index]
        return found

    @property
    def usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = self.events[-2]["usage"] if self.events else self.body["usage"]
        return usage

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.body["error"]
        assert set(self.body) == {"error"} and set(error) == {"message", "type", "param", "code"}, self.body
        assert "Traceback" not in error["message"]
        return error


class Bench:
    def __init__(self, stub: StubScheduler, session: Session, client: aiohttp.ClientSession, port: int, bodies: Bodies) -> None:
        self.stub = stub
        self.bodies = bodies
        self.session = session
        self.client = client
        self.port = port

    def ids(self, text: str) -> list[int]:
        return self.session.model.tokenizer.encode(text, False)

    def id(self, token: str) -> int:
        """Id of a token by its text (byte-level families)."""
        tokenizer = self.session.model.tokenizer
        return next(each for each in range(tokenizer.size) if tokenizer.piece(each) == token.encode())

    async def post(self, path: str, body: Any, **options: Any) -> Answer:
        send: dict[str, Any] = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        if isinstance(body, bytes):
            options.setdefault("headers", {"Content-Type": "application/json"})
        async with self.client.post(path, **send, **options) as response:
            if response.content_type == "text/event-stream":
                return Answer(response.status, response.headers, events=parse_events(await response.text()))
            return Answer(response.status, response.headers, json.loads(await response.text()))

    async def complete(self, prompt: Any = "x", **fields: Any) -> Answer:
        return await self.post("/v1/completions", {"prompt": prompt, **fields})

    async def chat(self, content: Any = "hi", **fields: Any) -> Answer:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    async def both(self, prompt: Any = "x", **fields: Any) -> tuple[Answer, Answer]:
        """The same completion whole and as a stream; their texts must agree."""
        whole = await self.complete(prompt, **fields)
        streamed = await self.complete(prompt, stream=True, stream_options={"include_usage": True}, **fields)
        assert whole.status == streamed.status == 200, (whole.body, streamed.body)
        for choice in whole.body["choices"]:
            assert streamed.text(choice["index"]) == choice["text"]
            assert streamed.choice(choice["index"])["finish_reason"] == choice["finish_reason"]
            assert streamed.choice(choice["index"])["stop_reason"] == choice["stop_reason"]
        assert streamed.usage == whole.usage
        return whole, streamed

    async def until_idle(self, timeout_s: float = 2.0) -> None:
        """Until no sequence is left at either end."""
        until = asyncio.get_running_loop().time() + timeout_s
        while True:
            left = (self.session.service.num_live, len(self.session.runs), list(self.stub.running))
            if not any(left):
                return
            assert asyncio.get_running_loop().time() < until, left
            await asyncio.sleep(0.01)


def parse_events(text: str) -> list[Any]:
    """Data of every event; comments are skipped. The last of a good stream is "[DONE]"."""
    events: list[Any] = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith((":", "event: response."))]
        if not lines:
            continue
        assert len(lines) == 1 and lines[0].startswith("data: "), lines
        data = lines[0].removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def load(folder: Path, name: str = "toy") -> ServedModel:
    return served_model.load(folder, name, "f" * 16)


@asynccontextmanager
async def running(folder: Path, canary: str = "ok", tracer: Tracer | None = None, **settings: Any) -> AsyncIterator[Bench]:
    """A gateway on a free port over a stub. Afterwards: a canary answers, nothing is live, no task is left."""
    before = asyncio.all_tasks()
    model = load(folder)
    stub = StubScheduler(model.tokenizer.encode(canary, False))
    settings = {"heartbeat_s": 0.1, "silence_s": 1.0, "gateway_link": stub.start(), **settings}
    config = Config(model=str(folder), host="127.0.0.1", port=0, **settings)
    async with Session(config, model) as session:
        app = create_app(session, config, tracer)
        runner = make_runner(app)
        await runner.setup()
        site = web.TCPSite(runner, config.host, config.port)
        await site.start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            await session.wait_ready(5)
            bench = Bench(stub, session, client, port, app[BODIES])
            yield bench
            await check_after(bench, canary)
        await runner.cleanup()
    await stub.die()
    await asyncio.sleep(0)
    leaked = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not leaked, leaked


async def check_after(bench: Bench, canary: str) -> None:
    bench.stub.plays.clear()
    play = Play(bench.ids(canary))
    bench.stub.script = lambda submit, sampling: play
    await bench.session.wait_ready(5)
    answer = await bench.complete("canary", max_tokens=8)
    assert answer.status == 200 and answer.text() == canary, answer.body
    await bench.until_idle()

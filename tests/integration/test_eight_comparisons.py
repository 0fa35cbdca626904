"""Random valid requests, each answered in eight pairs of ways that must agree: real gateway and scheduler, hashed tokens.

A stub worker samples hashes of all that a sequence attends to, of its seed and of the position, so whatever is mixed up on the
way from a request to a row of a step changes the answer.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.app import create_app
from gateway.session import Session
from scheduler.service import Service
from shared.config import Config
from shared.sampling import choice_seed
from tests import gateway_toys
from tests.integration.gateway_bench import load, parse_events
from tests.stub_worker import StubWorker
from tests.stub_worker import running as working

pytestmark = pytest.mark.timeout(300)

NUM_REQUESTS = 220  # asked about ten times each: 2,200 requests
AT_ONCE = 32
MAX_LEN = 256
WORDS = ["ABC", "Hello", " world", " Paris", "ab", " a", "naïve", "\n", "你好", "x" * 20]


@dataclass
class Asker:
    client: aiohttp.ClientSession

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer in one form, whole or streamed."""
        async with self.client.post("/v1/completions", json=body) as response:
            if response.content_type != "text/event-stream":
                whole = await response.json()
                assert response.status == 200, (body, whole)
                return {"choices": [_choice(each) for each in whole["choices"]], "usage": whole["usage"]}
            assert response.status == 200
            *events, last = parse_events(await response.text())
        assert last == "[DONE]" and events[-1]["choices"] == []
        grown: dict[int, dict[str, Any]] = {}
        for event in events[:-1]:
            for each in event["choices"]:
                choice = grown.setdefault(each["index"], {"text": "", "ids": [], "end": None})
                choice["text"] += each["text"]
                choice["ids"] += each.get("token_ids") or []
                choice["end"] = (each["finish_reason"], each.get("stop_reason"))
        return {"choices": [grown[index] for index in sorted(grown)], "usage": events[-1]["usage"]}

    async def ask_all(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(body: dict[str, Any]) -> dict[str, Any]:
            async with gate:
                return await self.ask(body)

        return list(await asyncio.gather(*map(one, bodies)))


@dataclass
class Cell(Asker):
    service: Service


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    return {"text": choice["text"], "ids": choice["token_ids"], "end": (choice["finish_reason"], choice["stop_reason"])}


@asynccontextmanager
async def cell(folder: Path, *, num_pages: int = 1025, **settings: Any) -> AsyncIterator[Cell]:
    """A scheduler, a stub worker and a gateway in this process."""
    links = {"gateway_link": "tcp://127.0.0.1:0", "worker_link": "tcp://127.0.0.1:0"}
    config = Config(model=str(folder), heartbeat_s=0.2, silence_s=20.0, **{**links, **settings})
    service, stop = Service(config, b"k" * 32), asyncio.Event()
    model = load(folder)
    links = {"gateway_link": service.gateways.address, "worker_link": service.workers.address}
    config = Config(model=str(folder), heartbeat_s=0.2, silence_s=20.0, name="stub", **{**settings, **links})
    async with AsyncExitStack() as stack:
        task = asyncio.create_task(service.run(stop))
        worker = StubWorker(
            config,
            vocabulary=model.vocab_size,
            num_pages=num_pages,
            num_slots=65,
            max_model_len=MAX_LEN,
            model=model.fingerprint,
        )
        await stack.enter_async_context(working(worker))
        session = await stack.enter_async_context(Session(config, model))
        runner = web.AppRunner(create_app(session, config), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        client = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}"))
        await session.wait_ready(10)
        yield Cell(client, service)
        await runner.cleanup()
        stop.set()
        await task


def make_request(rng: random.Random) -> dict[str, Any]:
    """A valid request that names every token it gets."""
    body: dict[str, Any] = {
        "prompt": "".join(rng.choices(WORDS, k=rng.randint(1, 14))),
        "max_tokens": rng.randint(1, 40),
        "seed": rng.getrandbits(63),
        "n": rng.choice([1, 1, 1, 2, 3]),
        "return_token_ids": True,
        "add_special_tokens": False,
    }
    extras: list[tuple[str, Any]] = [
        ("stop", rng.choice([["a"], "AB", [" world", "x"], "\n"])),
        ("min_tokens", rng.randint(0, body["max_tokens"])),
        ("stop_token_ids", rng.sample(range(4, 250), 3)),
        ("ignore_eos", True),
        ("temperature", rng.choice([0, 0.5, 1.3])),
        ("presence_penalty", 0.5),
        ("bad_words", ["Hello world"]),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("echo", True),
        ("priority", rng.randint(-2, 2)),
    ]
    body.update(rng.sample(extras, rng.randint(0, 4)))
    return body


def same(kind: str, bodies: list[dict[str, Any]], one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for body, left, right in zip(bodies, one, other, strict=True):
        assert left["choices"] == right["choices"], (kind, body)
        for name in ("prompt_tokens", "completion_tokens"):
            assert left["usage"][name] == right["usage"][name], (kind, body)


def cached(answers: list[dict[str, Any]]) -> int:
    return sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)


async def test_eight_ways_to_ask_agree(tmp_path: Path) -> None:
    folder = gateway_toys.write_model(tmp_path / "toy", gateway_toys.byte_level())
    tokenizer = load(folder).tokenizer
    rng = random.Random(2026)
    bodies = [make_request(rng) for _ in range(NUM_REQUESTS)]
    async with cell(folder) as first:
        cold = await first.ask_all(bodies)
        warm = await first.ask_all(bodies)
        assert cached(warm) > cached(cold)
        texts = [choice["text"] for answer in cold for choice in answer["choices"]]
        assert len(set(texts)) > 0.8 * len(texts)
        assert {choice["end"][0] for answer in cold for choice in answer["choices"]} == {"stop", "length"}
        same("warm = cold", bodies, warm, cold)
        same("batch = alone", bodies, [await first.ask(body) for body in bodies], cold)
        streams = [{**body, "stream": True, "stream_options": {"include_usage": True}} for body in bodies]
        same("stream = non-stream", bodies, await first.ask_all(streams), cold)
        by_ids = [{**body, "prompt": tokenizer.encode(body["prompt"], False)} for body in bodies]
        same("tokens in = text in", bodies, await first.ask_all(by_ids), cold)
        for body, answer in zip(bodies, cold, strict=True):
            seeds = [choice_seed(body["seed"], choice) for choice in range(body["n"])]
            alone = await first.ask_all([{**body, "n": 1, "seed": seed} for seed in seeds])
            assert [each["choices"][0] for each in alone] == answer["choices"], ("n = n singles", body)
    async with cell(folder, max_num_batched_tokens=24, max_num_seqs=16) as chunked:
        same("chunked = whole", bodies, await chunked.ask_all(bodies), cold)
    async with cell(folder, credits=1) as serial:
        same("credits 1 = 2", bodies, await serial.ask_all(bodies), cold)
    async with cell(folder, num_pages=41) as small:
        same("preempted = not", bodies, await small.ask_all(bodies), cold)
        assert small.service.cell.counters.preemptions > 0

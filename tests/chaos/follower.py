"""A client of one resumable stream that may be cut off anywhere, and goes on at any gateway after what it has read."""

import asyncio
import contextlib
import itertools
import json
from typing import Any

import aiohttp

from tests.integration.gateway_bench import Answer


class Refused(Exception):
    """An answer that is no stream."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"{status} {body}")
        self.status = status
        self.body = body


class Follower:
    def __init__(
        self, client: aiohttp.ClientSession, body: dict[str, Any], path: str = "/v1/completions", *, resumable: bool = True
    ) -> None:
        self._client = client
        self._body = body | {"stream": True, "resumable": resumable, "stream_options": {"include_usage": True}}
        self._path = path
        self.events: list[Any] = []  # in order, "[DONE]" last
        self.last_id = ""
        self.stream = ""
        self.num_resumes = 0

    @property
    def done(self) -> bool:
        return bool(self.events) and self.events[-1] == "[DONE]"

    @property
    def answer(self) -> Answer:
        assert self.done and not any("error" in event for event in self.events[:-1]), self.events[-2:]
        return Answer(200, {}, events=self.events)

    async def begin(self, url: str, limit: int = 2**31) -> None:
        """Read until the end, until the connection breaks, or until so many events have come: then hang up."""
        async with self._client.post(url + self._path, json=self._body) as response:
            await self._read(response, limit)

    async def go_on(self, url: str, limit: int = 2**31, **headers: str) -> None:
        """The same, after what came so far."""
        self.num_resumes += 1
        if self.last_id:
            headers["Last-Event-ID"] = self.last_id
        async with self._client.get(f"{url}/v1/streams/{self.stream}", headers=headers) as response:
            await self._read(response, limit)

    async def to_the_end(self, urls: list[str], limit: int = 2**31) -> None:
        """Go on at one gateway after the other until all is there, or so much. A server that is not ready is asked again."""
        for url in itertools.cycle(urls):
            if self.done or len(self.events) >= limit:
                return
            with contextlib.suppress(aiohttp.ClientConnectionError):
                try:
                    await (self.go_on(url, limit) if self.stream else self.begin(url, limit))
                except Refused as refusal:
                    if refusal.status != 503:
                        raise
            await asyncio.sleep(0.02)

    async def _read(self, response: aiohttp.ClientResponse, limit: int) -> None:
        if response.status != 200:
            raise Refused(response.status, await response.json())
        self.stream = response.headers.get("X-Stream-Id", "")
        event_id, data = "", ""
        try:
            async for raw in response.content:
                line = raw.decode().rstrip("\n")
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line.startswith("data: "):
                    data = line[6:]
                elif not line and data:  # only a whole event counts
                    self._take(event_id, data)
                    event_id, data = "", ""
                    if self.done or len(self.events) >= limit:
                        return
        except aiohttp.ClientPayloadError:  # cut off
            pass

    def _take(self, event_id: str, data: str) -> None:
        self.last_id = event_id or self.last_id
        self.events.append(data if data == "[DONE]" else json.loads(data))

"""Server-sent events of one request, written straight to the transport: no task wakes per token, a slow reader is bounded."""

import asyncio
import logging
from collections.abc import Sequence as Items
from typing import cast

from aiohttp import web

from gateway.choice import FINISH_REASONS, Choice, Entry
from gateway.replies import Reply, dump, quote
from gateway.resume import Place
from gateway.session import Run
from shared.messages import Finish

log = logging.getLogger("quire.gateway")

COMMENT = b": still here\n\n"
LAST_S = 60.0  # seconds a client may take to read the end of its stream
STREAM_HEADER = "X-Stream-Id"
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventWriter:
    """Frames of one response. Until open() what is sent waits here; after it every frame goes to the transport at once."""

    def __init__(self, request: web.Request, *, limit_bytes: int, comment_s: float, stream: str = "") -> None:
        self._request = request
        self._stream = stream
        self._limit_bytes = limit_bytes
        self._comment_s = comment_s
        self._loop = asyncio.get_running_loop()
        self._waiting: list[bytes] = []
        self.response: web.StreamResponse | None = None  # once it is open
        self._transport: asyncio.WriteTransport | None = None
        self._chunked = request.version >= (1, 1)
        self._timer: asyncio.TimerHandle | None = None
        self._wrote = 0.0  # loop time of the last frame
        self.dropped = False  # the client did not read

    def send(self, frame: bytes) -> None:
        transport = self._transport
        if transport is None:
            self._waiting.append(frame)
            return
        if transport.is_closing():
            return
        transport.write(b"%x\r\n%b\r\n" % (len(frame), frame) if self._chunked else frame)
        self._wrote = self._loop.time()
        if transport.get_write_buffer_size() > self._limit_bytes:
            self._drop(transport)

    def _drop(self, transport: asyncio.WriteTransport) -> None:
        log.warning("a reader is too slow: stream dropped", extra={"buffered": transport.get_write_buffer_size()})
        self.dropped = True
        transport.abort()

    async def open(self) -> web.StreamResponse:
        """Send the headers and everything that waited, unless that was done."""
        if self.response is not None:
            return self.response
        response = web.StreamResponse(headers=HEADERS | ({STREAM_HEADER: self._stream} if self._stream else {}))
        if self._chunked:
            response.enable_chunked_encoding()
        else:
            response.force_close()
        await response.prepare(self._request)
        self.response = response
        transport = self._transport = cast("asyncio.WriteTransport | None", self._request.transport)
        waiting, self._waiting = self._waiting, []
        if waiting and transport is not None:
            self.send(b"".join(waiting))
        self._timer = self._loop.call_later(self._comment_s, self._comment)
        return response

    async def drain(self) -> None:
        """Until a reader who reads has most of what was sent."""
        await asyncio.sleep(0)
        while self._transport is not None and self._transport.get_write_buffer_size() > self._limit_bytes // 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def comment(self) -> None:
        self.send(COMMENT)

    def _comment(self) -> None:
        idle_s = self._loop.time() - self._wrote
        if idle_s >= self._comment_s * 0.99:
            self.comment()
            idle_s = 0.0
        self._timer = self._loop.call_later(max(0.01, self._comment_s - idle_s), self._comment)

    async def close(self) -> None:
        """End the response; a client that does not read its end is cut off."""
        self.stop()
        if self.response is None or self._transport is None or self._transport.is_closing():
            return
        try:
            async with asyncio.timeout(LAST_S):
                await self.response.write_eof()
        except TimeoutError:
            self._drop(self._transport)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _was_taken(choice: Choice) -> bool:
    """It ended here because another gateway took it over, where it goes on: that end has no place among its events."""
    return choice.finish_reason == FINISH_REASONS[Finish.ABORT]


class StreamReply:
    """Listener of a run: turns what its choices grow by into event frames."""

    def __init__(self, reply: Reply, writer: EventWriter, place: Place | None = None) -> None:
        self._reply = reply
        self._writer = writer
        self._place = place  # of a resumable stream
        request = reply.request
        self._simple = request.logprobs < 0 and not request.return_token_ids and not request.continuous_usage
        self._before: dict[int, bytes] = {}  # by choice, once it has begun
        self.run: Run | None = None  # set when opened

    def on_text(self, choice: Choice, text: str, entries: Items[Entry]) -> None:
        before = self._before.get(choice.index)
        if before is None:
            before = self._begin(choice)
        if (mark := self._mark(choice.index)) is None:
            return
        if self._simple:
            self._writer.send(mark + before + quote(text).encode() + self._reply.after)
        else:
            self._send_chunk(mark, self._reply.growth(choice, text, entries))

    def on_end(self, choice: Choice) -> None:
        if choice.index not in self._before:
            self._begin(choice)
        if (mark := b"" if _was_taken(choice) else self._mark(choice.index)) is not None:
            self._send_chunk(mark, self._reply.ending(choice))

    def _begin(self, choice: Choice) -> bytes:
        before = self._before[choice.index] = self._reply.before(choice.index)
        opens = self._reply.chat or self._reply.request.return_token_ids
        if opens and (mark := self._mark(choice.index)) is not None:
            self._send_chunk(mark, self._reply.opening(choice))
        return before

    def _send_chunk(self, mark: bytes, body: dict[str, object]) -> None:
        usage = self.run.usage if self.run is not None and self._reply.request.continuous_usage else None
        self._writer.send(mark + self._reply.chunk([body], usage))

    def _mark(self, index: int) -> bytes | None:
        """What stands before the next event of a choice (the number of choices: of the end); None: the client has it."""
        return b"" if self._place is None else self._place.mark(index)

    def finish(self, run: Run) -> None:
        """The last frames of a good stream, or the error of a failed one (which has no [DONE])."""
        if run.failure is not None:
            self._writer.send(b"data: " + dump(run.failure.body()).encode() + b"\n\n")
            return
        taken = any(_was_taken(choice) for choice in run.choices)
        if self._reply.request.include_usage and (mark := b"" if taken else self._mark(len(run.choices))) is not None:
            self._writer.send(mark + self._reply.chunk([], run.usage))
        self._writer.send(b"data: [DONE]\n\n")

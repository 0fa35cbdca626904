"""Bodies of requests as they arrive: each within its limit and its time, and large ones within a limit together."""

import asyncio

from aiohttp import web

from gateway.errors import ApiError

BODY_S = 60.0  # seconds a client may take to send its body
SMALL_BYTES = 2**16  # so much of a body is never refused for what others send
TOGETHER_BYTES = 2**28  # of what lies beyond that, in all bodies that are arriving; at least one of the greatest size fits


class Bodies:
    """What one process holds of unfinished bodies."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._most_bytes = max(TOGETHER_BYTES, limit_bytes)
        self.held_bytes = 0  # beyond the small beginnings

    async def read(self, request: web.Request) -> bytes:
        """The whole body, or a 4xx or 503. Its length is refused before it is read where it is declared."""
        length = request.content_length
        if length is not None and length > self._limit_bytes:
            raise _too_large(self._limit_bytes, f"{length}")
        try:
            async with asyncio.timeout(BODY_S):
                return await self._collect(request)
        except TimeoutError:
            raise ApiError(408, f"The body did not arrive within {BODY_S:g} s", code="body_timeout") from None

    async def _collect(self, request: web.Request) -> bytes:
        parts: list[bytes] = []
        size = held = 0
        try:
            async for part in request.content.iter_any():
                size += len(part)
                if size > self._limit_bytes:
                    raise _too_large(self._limit_bytes, f"more than {self._limit_bytes}")
                more = max(0, size - SMALL_BYTES) - held
                if self.held_bytes + more > self._most_bytes:
                    text = f"Large bodies of more than {self._most_bytes} bytes are arriving at once; send this one again later"
                    raise ApiError(503, text, code="too_many_large_bodies", retry_after_s=2)
                held += more
                self.held_bytes += more
                parts.append(part)
            return b"".join(parts)
        finally:
            self.held_bytes -= held


def _too_large(limit: int, size: str) -> ApiError:
    return ApiError(413, f"The body has {size} bytes, limit {limit}", code="body_too_large")

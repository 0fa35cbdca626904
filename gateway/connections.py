"""HTTP below the routes: what is not HTTP, and what aiohttp would answer by itself, gets the API's error shape."""

import asyncio
import logging
import secrets
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from gateway.errors import ApiError
from gateway.handlers import error_response

log = logging.getLogger("quire.gateway")

LINE_BYTES = 8190  # of a header, and of a request's first line


class Connection(web.RequestHandler):
    """Bytes that are no request are answered where HTTP permits it, without a traceback in the log."""

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun already")
        if status < 500:
            error = _not_http(exc, message or "")
            log.info("not HTTP", extra={"peer": request.remote, "reason": error.text[:200]})
        else:
            log.error("a connection failed", exc_info=exc, extra={"peer": request.remote})
            error = ApiError(500, "Internal error; see the log", code="internal_error")
        response = _refusal(error)
        response.force_close()
        return response

    async def start(self) -> None:
        """Ends when the connection is told to close; aiohttp leaves one that was idle then open, with nobody to answer."""
        try:
            await super().start()
        finally:
            if self.transport is not None:
                self.transport.close()

    def log_exception(self, *args: Any, **facts: Any) -> None:
        """A body that broke off or was no body has been answered; whatever else comes here is a fault of ours."""
        if isinstance(facts.get("exc_info"), web.RequestPayloadError):
            log.debug("the rest of a body cannot be read")
        else:
            log.error(*args, **facts)


def _refusal(error: ApiError) -> web.Response:
    response = error_response(error)
    response.headers["X-Request-Id"] = f"req-{secrets.token_hex(12)}"
    return response


def _not_http(error: BaseException | None, message: str) -> ApiError:
    if isinstance(error, LineTooLong):
        text = f"The first line or a header of the request has more bytes than the limit of {LINE_BYTES}"
        return ApiError(431, text, code="header_too_large")
    why = message.strip().partition("\n")[0].rstrip(":")[:200].encode("ascii", "replace").decode()
    return ApiError(400, f"This is no HTTP/1.1 request: {why or 'it cannot be read'}", code="invalid_http")


class Server(web.Server):
    def __init__(self, handler: Any, request_factory: Any, idle_s: float) -> None:
        super().__init__(handler, request_factory=request_factory, handler_cancellation=True)
        self._idle_s = idle_s

    def __call__(self) -> Connection:
        """Bodies arrive as they were sent: a compressed one is refused by its header, never unpacked."""
        options: dict[str, Any] = {
            "access_log": None,
            "auto_decompress": False,
            "keepalive_timeout": self._idle_s,
            "max_field_size": LINE_BYTES,
            "max_line_size": LINE_BYTES,
        }
        return Connection(self, loop=asyncio.get_running_loop(), **options)


class Runner(web.AppRunner):
    """Cancelled handlers are how a client that left ends its sequences. Who sends no request for idle_s is cut off."""

    def __init__(self, app: web.Application, *, idle_s: float, shutdown_timeout_s: float) -> None:
        super().__init__(app, shutdown_timeout=shutdown_timeout_s)
        self._idle_s = idle_s

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            expected = request.headers.get("Expect", "100-continue")
            if expected.lower() != "100-continue":
                text = f"Expect: {expected[:100].encode('ascii', 'replace').decode()} cannot be met, only 100-continue"
                return _refusal(ApiError(417, text, code="expectation_failed"))
            return await made.request_handler(request)

        return Server(answer, made.request_factory, self._idle_s)

"""The aiohttp application: routes, one error shape, request ids, request counts; and serving it until told to stop."""

import asyncio
import gc
import logging
import secrets
import signal
import socket
import time
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway import api_keys, tls
from gateway.api_keys import ANYBODY, Tenant
from gateway.bodies import Bodies
from gateway.connections import Runner
from gateway.cors import Origins
from gateway.errors import ApiError
from gateway.handlers import (
    BODIES,
    CONFIG,
    KEYS,
    PROBES,
    REQUEST_ID,
    ROUTES,
    SESSION,
    TENANT,
    TRACE,
    WATCH_ROUTES,
    error_response,
)
from gateway.operate import OPERATOR_ROUTES
from gateway.served_model import ServedModel
from gateway.session import Session
from shared.config import Config
from shared.tracing import HEADER, Tracer, open_tracer, trace_id, traceparent

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger("quire.gateway")

ORIGINS = web.AppKey("origins", Origins)
TRACER = web.AppKey("tracer", Tracer)
OPEN = ("/health", "/ready")  # answered without a key
READER_S = 60.0  # that a client may take nothing of what was written for it
IDLE_S = 75.0  # that a connection may stay open without a request; a little more than proxies keep theirs
CLIENT_ID_CHARS = 128  # of a client's own request id, which is echoed


def create_app(session: Session, config: Config, tracer: Tracer | None = None) -> web.Application:
    """The HTTP side of a session that its owner has entered."""
    app = web.Application(middlewares=[frame])
    app[BODIES] = Bodies(config.max_body_bytes)
    app[CONFIG] = config
    app[SESSION] = session
    if (keys := api_keys.load(config.api_key_file)) is not None:
        app[KEYS] = keys
    app[ORIGINS] = Origins(config.cors_origins)
    if tracer is not None:
        app[TRACER] = tracer
    app.add_routes(ROUTES)
    app.on_response_prepare.append(_add_headers)
    gauge = session.metrics.gauge
    gauge("live_sequences", "Choices being computed or waiting", lambda: session.service.num_live)
    gauge("running_requests", "Requests under way", lambda: len(session.runs))
    gauge("connected", "1 while the scheduler is reachable", lambda: float(session.service.welcome is not None))
    gauge("resubmitted_sequences", "Sequences continued after a loss, since start", lambda: session.service.num_resubmitted)
    return app


def create_watch_app(session: Session, config: Config) -> web.Application:
    """What watches this process asks here: no keys, no TLS, and no way to generate."""
    app = web.Application(middlewares=[frame])
    app[CONFIG] = config
    app[SESSION] = session
    app.add_routes(WATCH_ROUTES)
    return app


def create_admin_app(session: Session, config: Config) -> web.Application:
    """As the watch app, and what only operators may do."""
    app = create_watch_app(session, config)
    app.add_routes(OPERATOR_ROUTES)
    return app


def identify(request: web.Request) -> Tenant:
    """Whose request it is. With keys, every path needs one, known or not, except where it leads to an open route."""
    keys = request.app.get(KEYS)
    resource = request.match_info.route.resource
    if keys is None or (resource is not None and resource.canonical in OPEN):
        return ANYBODY
    return keys.tenant(request.headers.get("Authorization", ""))


@web.middleware
async def frame(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Around every request: its id, its error shape, its count, its log line."""
    _cut_off_who_does_not_read(request)
    request[REQUEST_ID] = f"req-{secrets.token_hex(12)}"
    started = time.monotonic()
    route = request.match_info.route.resource
    name = route.canonical if route is not None else "none"
    span = _begin_span(request, name)
    request[TRACE] = traceparent(span) if span is not None else ""
    status = 499  # the client left
    try:
        response = await _answer(request, handler)
        status = response.status
        if request.app[SESSION].draining and not response.prepared:
            response.force_close()  # over a new connection the client may find another gateway
        return response
    finally:
        request.app[SESSION].metrics.requests[name, str(status)] += 1
        took_ms = round(1000 * (time.monotonic() - started), 1)
        level = logging.DEBUG if name in PROBES else logging.INFO
        ids = {"id": request[REQUEST_ID]} | ({"trace": trace_id(request[TRACE])} if request[TRACE] else {})
        log.log(level, "request", extra={**ids, "route": name, "status": status, "ms": took_ms})
        if span is not None:
            span.set_attribute("http.response.status_code", status)
            span.end()


def _begin_span(request: web.Request, route: str) -> "Span | None":
    """Of a request that is traced; its caller's traceparent may say whether."""
    tracer = request.app.get(TRACER)
    if tracer is None or route in PROBES:
        return None
    facts = {"http.request.method": request.method, "http.route": route, "quire.request": request[REQUEST_ID]}
    return tracer.begin(f"{request.method} {route}", request.headers.get(HEADER, ""), facts)


def _cut_off_who_does_not_read(request: web.Request) -> None:
    """The kernel ends a connection whose other end takes nothing (or is no more) for READER_S while something waits for it."""
    sock = request.transport.get_extra_info("socket") if request.transport is not None else None
    if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * READER_S))


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        if (origins := request.app.get(ORIGINS)) is not None and (answer := origins.preflight(request)) is not None:
            return answer
        request[TENANT] = identify(request)
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        text = {
            404: f"There is no route {request.method} {request.path[:200]}",
            405: f"{request.path[:200]} does not answer {request.method}",
        }.get(error.status, error.reason)
        code = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}.get(error.status, "http_error")
        response = error_response(ApiError(error.status, text, code=code))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except web.RequestPayloadError:
        return error_response(
            ApiError(400, "The body cannot be read: it broke off, or its chunks are none", code="invalid_http")
        )
    except (asyncio.CancelledError, ConnectionResetError):
        raise
    except Exception:
        log.exception("a request failed", extra={"id": request[REQUEST_ID]})
        return error_response(ApiError(500, "Internal error; see the log for this request id", code="internal_error"))


async def _add_headers(request: web.BaseRequest, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = request.get(REQUEST_ID, "")
    if isinstance(request, web.Request) and (tenant := request.get(TENANT)) is not None:
        response.headers.update(tenant.headers(time.monotonic()))
    if isinstance(request, web.Request) and (origins := request.app.get(ORIGINS)) is not None:
        response.headers.update(origins.headers(request))
    theirs = request.headers.get("X-Client-Request-Id") or request.headers.get("X-Request-Id")
    if theirs and theirs.isascii() and theirs.isprintable():
        response.headers["X-Client-Request-Id"] = theirs[:CLIENT_ID_CHARS]


def make_runner(app: web.Application) -> web.AppRunner:
    return Runner(app, idle_s=IDLE_S, shutdown_timeout_s=5.0)


async def serve(config: Config, model: ServedModel) -> None:
    """Serve until SIGTERM or SIGINT, then refuse what is new (503) and let streams end; a second signal ends them."""
    certificate = tls.context(config)
    tracer = open_tracer(config, "gateway")
    async with Session(config, model) as session:
        runner = make_runner(create_app(session, config, tracer))
        watch = make_runner(create_watch_app(session, config))
        admin = make_runner(create_admin_app(session, config))
        for each in (runner, watch, admin):
            await each.setup()
        keeper = asyncio.create_task(tls.keep_fresh(certificate, config)) if certificate else None
        try:
            site = web.TCPSite(runner, config.host, config.port, ssl_context=certificate)
            await site.start()
            if config.metrics_port:
                await web.TCPSite(watch, config.metrics_host, config.metrics_port).start()
            if config.admin_port:
                await web.TCPSite(admin, "127.0.0.1", config.admin_port).start()
            port = runner.addresses[0][1]
            url = f"http{'s' if certificate else ''}://{config.host}:{port}"
            log.info("listening", extra={"url": url, "model": model.name})
            gc.collect()
            gc.freeze()  # what start-up made stays; later collections need not look at it
            await _until_stopped(session, runner)
        finally:
            if keeper is not None:
                keeper.cancel()
            for each in (admin, watch, runner):
                await each.cleanup()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)


async def _until_stopped(session: Session, runner: web.AppRunner) -> None:
    loop = asyncio.get_running_loop()
    signals = asyncio.Queue[signal.Signals]()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    await signals.get()
    session.draining = "this gateway stops"
    log.info("draining", extra={"running": len(session.runs)})  # who comes now is told 503 and when to try again
    if runner.server is not None:
        runner.server.pre_shutdown()  # idle connections end now, the others with their answer: the next leads to who stays
    idle = asyncio.create_task(session.wait_idle())
    again = asyncio.create_task(signals.get())
    await asyncio.wait({idle, again}, return_when=asyncio.FIRST_COMPLETED)
    for task in (idle, again):
        task.cancel()
    log.info("stopping", extra={"running": len(session.runs)})
    session.stop()

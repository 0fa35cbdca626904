"""The routes: each reads a request, asks the session, and answers. Errors leave as ApiError; app.py gives them their shape."""

import asyncio
import importlib.metadata
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway import json_body, openai, openapi, resume
from gateway.api_keys import KeyRing, Tenant
from gateway.bodies import Bodies
from gateway.errors import ApiError, BadRequest
from gateway.limits import Limits
from gateway.replies import Reply, dump
from gateway.request import ValidRequest
from gateway.response_reply import ResponseEvents, ResponseReply
from gateway.response_request import parse_response, repeated
from gateway.session import Prepared, Run, Session
from gateway.sse import EventWriter, StreamReply
from shared.config import Config

DEADLINE_HEADER = "X-Request-Timeout"
MAX_DEADLINE_S = 7 * 24 * 3600.0
DUMPED_AT_ONCE = 8192  # items of a list: less than a millisecond
BODIES = web.AppKey("bodies", Bodies)
CONFIG = web.AppKey("config", Config)
SESSION = web.AppKey("session", Session)
KEYS = web.AppKey("keys", KeyRing)
TENANT = web.RequestKey("tenant", Tenant)
REQUEST_ID = web.RequestKey("request_id", str)
TRACE = web.RequestKey("trace", str)  # W3C traceparent of the request's span; empty: it is not traced
STARTED = int(time.time())


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=dump(value).encode(), status=status, content_type="application/json", headers=headers)


def error_response(error: ApiError) -> web.Response:
    headers = {"Retry-After": str(max(1, round(error.retry_after_s)))} if error.retry_after_s > 0 else {}
    if error.status == 429 and not headers:
        headers["X-Should-Retry"] = "false"  # what OpenAI's clients ask before they try again
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error.body(), error.status, headers)


async def read_body(request: web.Request) -> dict[str, Any]:
    """The JSON object a client sent."""
    if (encoding := request.headers.get("Content-Encoding", "identity").lower()) != "identity":
        text = f"Content-Encoding {encoding[:100].encode('ascii', 'replace').decode()} is not supported; send the body as it is"
        raise ApiError(415, text, code="unsupported_content_encoding")
    kind = request.content_type if "Content-Type" in request.headers else "application/json"
    if kind != "application/json" and not kind.endswith("+json"):
        text = f"Content-Type must be application/json, got {kind[:100]}"
        raise ApiError(415, text, code="unsupported_media_type")
    raw = await request.app[BODIES].read(request)
    return json_body.decode(raw, request.app[SESSION].limits.max_depth)


def read_deadline(request: web.Request) -> float:
    """Seconds after which the client does not want an answer any more; 0: it did not say."""
    text = request.headers.get(DEADLINE_HEADER)
    if text is None:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_DEADLINE_S:
        shown = text[:40].encode("ascii", "replace").decode()
        raise BadRequest(f"{DEADLINE_HEADER} must be above 0 and at most {MAX_DEADLINE_S:g} s, got {shown!r}", DEADLINE_HEADER)
    return seconds


def named(prepared: Prepared, request: web.Request) -> Prepared:
    """The same request, under the names that logs and traces have for it."""
    return replace(prepared, recipe=replace(prepared.recipe, request=request[REQUEST_ID], trace=request[TRACE]))


@contextmanager
def early_leavers(session: Session) -> Iterator[None]:
    """Count a client that leaves before its request runs; later ones are counted by the run."""
    try:
        yield
    except (asyncio.CancelledError, ConnectionResetError):
        session.metrics.aborted += 1
        raise


def generation(parse: Callable[[Mapping[str, Any], Limits], ValidRequest], prefix: str) -> Handler:
    """The handler of one of the older generation APIs."""

    async def handle(request: web.Request) -> web.StreamResponse:
        session = request.app[SESSION]
        valid, _ = await read_request(request, parse)
        tenant = request[TENANT]
        with tenant.request(time.monotonic()):
            prepared = await prepare(request, valid)
            request_id, created, model = f"{prefix}-{secrets.token_hex(12)}", int(time.time()), session.model.name
            reply = Reply(valid, session.model.tokenizer, model, request_id, created)
            if valid.resumable:
                name = resume.new_stream()
                prepared = resume.with_tickets(prepared, name, request_id, created, model)
                place = resume.Place(name, len(prepared.prompts) * valid.n)
                return await stream(request, prepared, lambda writer: StreamReply(reply, writer, place))
            if valid.stream:
                return await stream(request, prepared, lambda writer: StreamReply(reply, writer))
            return await whole(request, prepared, reply.whole)

    return handle


async def responses(request: web.Request) -> web.StreamResponse:
    """OpenAI's newest generation API, for text; nothing is stored."""
    session = request.app[SESSION]
    valid, body = await read_request(request, parse_response)
    with request[TENANT].request(time.monotonic()):
        prepared = await prepare(request, valid)
        model = session.model
        reply = ResponseReply(valid, model.tokenizer, model.name, int(time.time()), repeated(body))
        if valid.stream:
            return await stream(request, prepared, lambda writer: ResponseEvents(reply, writer))
        return await whole(request, prepared, reply.whole)


async def read_request(
    request: web.Request, parse: Callable[[Mapping[str, Any], Limits], ValidRequest]
) -> tuple[ValidRequest, dict[str, Any]]:
    """What a client asks for, checked, and the body that said so."""
    session = request.app[SESSION]
    with early_leavers(session):
        body = await read_body(request)
        valid = parse(body, session.limits)
    deadline_s = read_deadline(request)
    return (replace(valid, deadline_s=deadline_s) if deadline_s > 0 else valid), body


async def prepare(request: web.Request, valid: ValidRequest) -> Prepared:
    """Its token ids, which are counted for its tenant."""
    session, tenant = request.app[SESSION], request[TENANT]
    with early_leavers(session):
        prepared = named(await session.prepare(valid, tenant.name, tenant.salt, tenant.weight), request)
    tenant.take_prompt(sum(len(prompt.ids) for prompt in prepared.prompts), time.monotonic())
    return prepared


async def whole(request: web.Request, prepared: Prepared, body: Callable[[Run], dict[str, Any]]) -> web.Response:
    """Answer once everything is there."""
    async with request.app[SESSION].open(prepared) as run:
        try:
            await run.wait()
        finally:
            request[TENANT].tokens.spend(run.usage.completion_tokens, time.monotonic())
    return json_response(body(run))


async def go_on(request: web.Request) -> web.StreamResponse:
    """The rest of a resumable stream, whichever gateway it began on and whether that one lives. It is this one's afterwards."""
    session, tenant, name = request.app[SESSION], request[TENANT], request.match_info["id"]
    seen = resume.read_event_id(request.headers.get(resume.LAST_EVENT_ID), name)
    session.check_available()
    found = await session.service.take(name, tenant.name)
    if not found:
        grace_s = request.app[CONFIG].resume_grace_s
        raise resume.not_found(name, f"it never was, or was left more than {grace_s:g} s ago, or is not yours")
    with tenant.request(time.monotonic()):
        again = await resume.reopen(session, tenant, found, seen)
        ticket = again.ticket
        reply = Reply(ticket.request, session.model.tokenizer, ticket.model, ticket.answer_id, ticket.created)
        return await stream(request, named(again.prepared, request), lambda writer: StreamReply(reply, writer, again.place))


async def stream(
    request: web.Request, prepared: Prepared, listen: Callable[[EventWriter], StreamReply | ResponseEvents]
) -> web.StreamResponse:
    """Answer as events. Refusals that come before the first token still have their own status."""
    session, config = request.app[SESSION], request.app[CONFIG]
    limit_bytes, comment_s = config.write_buffer_bytes, config.sse_comment_s
    writer = EventWriter(request, limit_bytes=limit_bytes, comment_s=comment_s, stream=prepared.recipe.stream)
    listener = listen(writer)
    try:
        listener.run = session.open(prepared, listener)
        async with listener.run as run:
            if prepared.known:
                if any(known.output for known in prepared.known):
                    await writer.open()
                await run.retell(writer.drain)
            try:
                await asyncio.wait_for(run.begun.wait(), config.sse_comment_s)
            except TimeoutError:
                writer.comment()
            if run.failure is not None and writer.response is None:
                raise run.failure
            response = await writer.open()
            await run.done.wait()
        listener.finish(run)
        await writer.close()
        return response
    finally:
        writer.stop()
        if listener.run is not None:
            num_new = listener.run.usage.completion_tokens - listener.run.num_retold
            request[TENANT].tokens.spend(num_new, time.monotonic())
        if writer.dropped:
            session.metrics.slow_readers += 1


async def models(request: web.Request) -> web.Response:
    return json_response({"object": "list", "data": [_model(request.app[SESSION])]})


async def model(request: web.Request) -> web.Response:
    session = request.app[SESSION]
    openai.check_model(request.match_info["name"] or "?", session.limits)
    return json_response(_model(session))


def _model(session: Session) -> dict[str, Any]:
    name = session.model.name
    length = session.service.max_len or None
    return {"id": name, "object": "model", "created": STARTED, "owned_by": "quire", "root": name, "max_model_len": length}


async def tokenize(request: web.Request) -> web.Response:
    session = request.app[SESSION]
    valid, strings = openai.parse_tokenize(await read_body(request), session.limits)
    if valid.messages is not None and not session.limits.has_chat_template:
        raise BadRequest("This model has no chat template", "messages", "no_chat_template")
    source = await session.render(valid) if valid.messages is not None else (valid.prompts or [""])[0]
    tokenizer = session.model.tokenizer
    ids = await tokenizer.encode_async(source, valid.add_special_tokens) if isinstance(source, str) else source
    names = [tokenizer.printed(token) for token in ids] if strings else None
    facts = {"count": len(ids), "max_model_len": session.service.max_len}
    lists = [f'"tokens":{await dump_list(ids)}', f'"token_strs":{"null" if names is None else await dump_list(names)}']
    return web.Response(body=f"{dump(facts)[:-1]},{','.join(lists)}}}".encode(), content_type="application/json")


async def dump_list(items: Sequence[object]) -> str:
    """JSON of a list, however long; others have their turn meanwhile."""
    parts = []
    for start in range(0, len(items), DUMPED_AT_ONCE):
        parts.append(dump(items[start : start + DUMPED_AT_ONCE])[1:-1])
        await asyncio.sleep(0)
    return f"[{','.join(parts)}]"


async def detokenize(request: web.Request) -> web.Response:
    session = request.app[SESSION]
    ids = openai.parse_detokenize(await read_body(request), session.limits)
    return json_response({"prompt": await session.model.tokenizer.decode_async(ids)})


async def health(request: web.Request) -> web.Response:
    """This process runs. Says nothing of the scheduler: restarting a gateway does not cure that."""
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """Requests can be computed now; 503 with the reason if not."""
    session = request.app[SESSION]
    session.check_available()
    return json_response({"status": "ready", "max_model_len": session.service.max_len})


async def metrics(request: web.Request) -> web.Response:
    """As Prometheus' text, or as OpenMetrics (with the request ids of some slow ones) for who asks for that."""
    text, content_type = request.app[SESSION].metrics.render(request.headers.get("Accept", ""))
    return web.Response(body=text, headers={"Content-Type": content_type})


async def embeddings(request: web.Request) -> web.Response:
    await read_body(request)
    name = request.app[SESSION].model.name
    raise BadRequest(f"{name} generates text and makes no embeddings", "model", "unsupported_model")


async def description(request: web.Request) -> web.Response:
    return json_response(openapi.document(request.app[SESSION].limits))


async def documentation(request: web.Request) -> web.Response:
    return web.Response(text=openapi.page(), content_type="text/html")


async def version(request: web.Request) -> web.Response:
    try:
        number = importlib.metadata.version("quire")
    except importlib.metadata.PackageNotFoundError:
        number = "source"
    return json_response({"version": number})


ROUTES = (
    web.post("/v1/chat/completions", generation(openai.parse_chat, "chatcmpl")),
    web.post("/v1/completions", generation(openai.parse_completion, "cmpl")),
    web.post("/v1/responses", responses),
    web.get("/v1/streams/{id}", go_on, allow_head=False),
    web.get("/v1/models", models),
    web.get("/v1/models/{name:.*}", model),
    web.post("/tokenize", tokenize),
    web.post("/detokenize", detokenize),
    web.get("/health", health),
    web.get("/ready", ready),
    web.get("/metrics", metrics),
    web.get("/version", version),
    web.post("/v1/embeddings", embeddings),
    web.get("/openapi.json", description),
    web.get("/docs", documentation),
)
PROBES = ("/health", "/ready", "/metrics")  # asked every few seconds by whoever watches: no news
WATCH_ROUTES = tuple(route for route in ROUTES if route.path in PROBES)

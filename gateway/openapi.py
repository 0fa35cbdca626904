"""/openapi.json and a page that shows it, from the tables that requests are checked against."""

from functools import cache
from html import escape
from typing import Any

from gateway import fields
from gateway.limits import Limits
from gateway.schema import CHAT, COMPLETION, FIELDS, RESPONSES, Field

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
GENERATION: dict[str, tuple[str, list[str]]] = {
    "/v1/chat/completions": (CHAT, ["messages"]),
    "/v1/completions": (COMPLETION, ["prompt"]),
    "/v1/responses": (RESPONSES, ["input"]),
}
PLAIN = {
    "/v1/models": "The served model",
    "/health": "This process lives",
    "/ready": "Requests can be computed",
    "/metrics": "Prometheus metrics",
    "/version": "Version of the server",
    "/openapi.json": "This description",
}
STREAM: dict[str, Any] = {
    "summary": "The rest of a resumable stream",
    "parameters": [
        {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}},
        {"name": "Last-Event-ID", "in": "header", "schema": {"type": "string"}},
    ],
}
TOKENS: dict[str, Any] = {"tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}}
TEXTS: dict[str, Any] = {"prompt": {"type": "string"}, "messages": {"type": "array", "items": {"type": "object"}}}
MESSAGES: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "object", "required": ["role"], "properties": {"role": {"type": "string"}, "content": {}}},
}
NOT_HERE: dict[str, dict[str, Any]] = {
    "messages": MESSAGES,
    "input": {"type": ["string", "array"], "items": {"type": "object"}},
    "chat_template_kwargs": {"type": ["object", "null"]},
}  # checked together with other fields


def _field(each: Field, limits: Limits) -> dict[str, Any]:
    text = f"{each.kind}: {each.note}"
    if each.kind == "refused":
        return {"description": text, "enum": [None, *each.harmless]}
    if each.name in NOT_HERE:
        return {"description": text, **NOT_HERE[each.name]}
    assert each.check is not None
    shape = fields.shape(each.check, limits)
    if "type" in shape and each.name != "prompt":
        kinds = shape["type"] if isinstance(shape["type"], list) else [shape["type"]]
        shape = {**shape, "type": [*kinds, "null"]}
    return {"description": text, **shape}


def _answers(kinds: tuple[str, ...]) -> dict[str, Any]:
    error = {"description": "What is wrong", "content": {"application/json": {"schema": ERROR}}}
    good = {"description": "The answer", "content": {kind: {} for kind in kinds}}
    return {"200": good, "4XX": error, "5XX": error}


def _body(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def document(limits: Limits) -> dict[str, Any]:
    """OpenAPI 3.1."""
    json_kind, stream_kind = "application/json", "text/event-stream"
    paths: dict[str, Any] = {}
    for path, (api, required) in GENERATION.items():
        described = {name: _field(each, limits) for name, each in sorted(FIELDS[api].items())}
        paths[path] = {"post": {"requestBody": _body(described, required), "responses": _answers((json_kind, stream_kind))}}
    for path, properties, required in (("/tokenize", TEXTS, []), ("/detokenize", TOKENS, ["tokens"])):
        paths[path] = {"post": {"requestBody": _body(properties, required), "responses": _answers((json_kind,))}}
    for path, text in PLAIN.items():
        kind = "text/plain" if path == "/metrics" else json_kind
        paths[path] = {"get": {"summary": text, "responses": _answers((kind,))}}
    paths["/v1/streams/{id}"] = {"get": {**STREAM, "responses": _answers((stream_kind,))}}
    return {"openapi": "3.1.0", "info": {"title": "Quire", "version": "1"}, "paths": paths}


@cache
def page() -> str:
    """The fields of the generation APIs as one HTML page without scripts."""
    parts = [
        "<!doctype html><meta charset=utf-8><title>Quire</title><h1>Quire</h1>",
        "<p>All of it: <a href=openapi.json>openapi.json</a>",
    ]
    for path, (api, _) in GENERATION.items():
        parts.append(f"<h2>POST {path}</h2><table><tr><th>field<th>kind<th>rule")
        parts += [f"<tr><td>{escape(name)}<td>{each.kind}<td>{escape(each.note)}" for name, each in sorted(FIELDS[api].items())]
        parts.append("</table>")
    return "\n".join(parts)

"""Chat messages: checked, and brought to the one shape that chat templates expect (text content, tool arguments as objects)."""

import json
from collections.abc import Mapping
from typing import Any

from gateway import json_body
from gateway.errors import BadRequest
from gateway.fields import expect, short_string, shown, sized, wrong_type
from gateway.limits import Limits

ROLES = ("system", "developer", "user", "assistant", "tool")
# Optional text fields by role; content is checked apart.
TEXTS = {
    "system": ("name",),
    "developer": ("name",),
    "user": ("name",),
    "assistant": ("name", "refusal", "reasoning_content", "reasoning"),
    "tool": ("name", "tool_call_id"),
}
# What clients echo from an answer although it says nothing.
EMPTY: dict[str, tuple[Any, ...]] = {"annotations": ([], None), "audio": (None,), "function_call": (None,)}


def parse_messages(value: Any, path: str, limits: Limits) -> list[dict[str, Any]]:
    """The messages of a chat request as their template sees them."""
    sized(expect(list, value, path), path, limits.max_messages, "messages")
    if not value:
        raise BadRequest(f"{path} must not be empty", path, "empty_prompt")
    return [_message(each, f"{path}[{at}]", limits) for at, each in enumerate(value)]


def _message(value: Any, path: str, limits: Limits) -> dict[str, Any]:
    expect(dict, value, path)
    role = value.get("role")
    if role not in ROLES:
        raise BadRequest(f"{path}.role must be one of {', '.join(ROLES)}; got {shown(role)}", f"{path}.role")
    message: dict[str, Any] = {"role": role}
    for name, field in value.items():
        where = f"{path}.{name}"
        if name in ("role", "content"):
            continue
        if name == "tool_calls" and role == "assistant":
            if field:
                message[name] = _tool_calls(field, where, limits)
        elif name in TEXTS[role]:
            if field is not None:
                message[name] = expect(str, field, where)
        elif role == "assistant" and name in EMPTY:
            if field not in EMPTY[name]:
                raise BadRequest(f"{where} is not supported", where, "unsupported_parameter")
        else:
            raise BadRequest(f"Unrecognized field {where} in a message of role {role}", where, "unknown_parameter")
    message["content"] = _content(value.get("content"), f"{path}.content", limits, may_be_null="tool_calls" in message)
    return message


def _content(value: Any, path: str, limits: Limits, *, may_be_null: bool) -> str:
    if value is None and may_be_null:
        return ""
    return texts_of(value, path, limits, {"text": "text"}, ("type",))


def texts_of(value: Any, path: str, limits: Limits, kinds: Mapping[str, str], others: tuple[str, ...]) -> str:
    """The text of a content. kinds: types of parts, and the field of each that holds its text; others: further fields."""
    if type(value) is str:
        return value
    if type(value) is not list:
        raise wrong_type(path, "a string or an array of text parts", value)
    texts = []
    for at, part in enumerate(sized(value, path, limits.max_parts, "parts")):
        where = f"{path}[{at}]"
        kind = expect(dict, part, where).get("type")
        if type(kind) is not str or kind not in kinds:
            text = f"{where}.type: content of type {shown(kind)} is not supported, only {' and '.join(kinds)}"
            raise BadRequest(text, f"{where}.type", "unsupported_parameter")
        for name in part:
            if name != kinds[kind] and name not in others:
                raise BadRequest(f"Unrecognized field {where}.{name}", f"{where}.{name}", "unknown_parameter")
        texts.append(expect(str, part.get(kinds[kind]), f"{where}.{kinds[kind]}"))
    return "\n".join(texts)


def _tool_calls(value: Any, path: str, limits: Limits) -> list[dict[str, Any]]:
    calls = []
    for at, call in enumerate(sized(expect(list, value, path), path, limits.max_parts, "tool calls")):
        where = f"{path}[{at}]"
        function = expect(dict, expect(dict, call, where).get("function"), f"{where}.function")
        for name in call:
            if name not in ("id", "type", "function", "index"):
                raise BadRequest(f"Unrecognized field {where}.{name}", f"{where}.{name}", "unknown_parameter")
        clean: dict[str, Any] = {"type": "function"}
        if call.get("id") is not None:
            clean["id"] = short_string(call["id"], f"{where}.id", limits)
        name = short_string(function.get("name"), f"{where}.function.name", limits)
        arguments = _arguments(function.get("arguments"), f"{where}.function.arguments", limits)
        clean["function"] = {"name": name, "arguments": arguments}
        calls.append(clean)
    return calls


def _arguments(value: Any, path: str, limits: Limits) -> dict[str, Any]:
    """Clients send a JSON string, or the object itself; templates get the object."""
    if type(value) is str:
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError):
            raise BadRequest(f"{path} must be a JSON object, or one as a string", path, "invalid_json") from None
        json_body.check(value, limits.max_depth, path)  # what its escapes stand for was not checked with the body
    arguments: dict[str, Any] = expect(dict, {} if value is None else value, path)
    return arguments
